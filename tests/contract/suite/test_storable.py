"""What a handler returns, raises or reports is stored, or fails the job once with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tenure.contracts.bullmq.ledger import BullmqLedger
from tenure.core.job import JobRecord
from tenure.core.registry import open_ledger
from tenure.core.retry import fixed
from tenure.worker import task
from tenure.worker.job import Job
from tests.contract.adapters import Stage, served_url
from tests.contract.suite.acting import job, record, submit
from tests.contract.suite.serving import serving, until

pytestmark = pytest.mark.clause("M-15")


def holds_nul(stage: Stage) -> bool:
    return stage.queue().features.holds_nul


def nested(levels: int) -> Any:
    value: Any = "deep"
    for _ in range(levels):
        value = [value]
    return value


async def run(stage: Stage, act: Callable[[Job], Any]) -> tuple[JobRecord, int]:
    """The job after one worker had it, and how often its handler ran."""
    runs = 0

    @task("work", retry=fixed(50))
    async def work(job: Job) -> Any:
        nonlocal runs
        runs += 1
        return await act(job)

    async def ended() -> JobRecord | None:
        found = await record(stage, job_id)
        return found if found.state in stage.words.of("done", "failed") else None

    (job_id,) = await submit(stage.queue("producer"), job(max_attempts=3))
    async with serving(stage, work):
        return await until(stage, ended), runs


RESULTS = {
    "a NUL": ("a\0b", "a\ufffdb"),
    "half a surrogate": ("a\ud83db", "a\ufffdb"),
    "both in a key": ({"k\0\udc00": [1, None]}, {"k\ufffd\ufffd": [1, None]}),
    "sixty levels": (nested(60), nested(60)),
    "an escaped backslash before u0000": ("\\u0000", "\\u0000"),
}


@pytest.mark.parametrize("name", RESULTS)
async def test_a_result_that_no_store_could_hold_as_it_is_ends_the_job_once(
    stage: Stage, name: str
) -> None:
    value, kept = RESULTS[name]

    async def act(_: Job) -> Any:
        return value

    ended, runs = await run(stage, act)
    if holds_nul(stage):
        kept = {"a NUL": value, "both in a key": {"k\0\ufffd": [1, None]}}.get(name, kept)
    assert (ended.state, runs) == (stage.words.done, 1), ended.error
    assert msgspec.json.decode(ended.result) == kept
    told = [event.data.decode() for event in await stage.ledger.events(ended.job_id)]
    ledger = open_ledger(served_url(stage))
    if isinstance(ledger, BullmqLedger):  # BullMQ has a log beside a job's events
        told = await ledger.logs(ended.job_id)
    await ledger.close()
    assert any("replaced" in data for data in told) == (value != kept), told


UNSTORABLE = {
    "NaN": [1.5, {"x": float("nan")}],
    "Infinity": float("-inf"),
    "a thousand levels": nested(1_000),
    "an object": object(),
}


@pytest.mark.parametrize("name", UNSTORABLE)
async def test_a_result_that_cannot_be_stored_fails_the_job_once_with_that_reason(
    stage: Stage, name: str
) -> None:
    async def act(_: Job) -> Any:
        return UNSTORABLE[name]

    ended, runs = await run(stage, act)
    assert (ended.state, runs) == (stage.words.failed, 1)
    assert b"the handler returned" in ended.error, ended.error


@pytest.mark.parametrize(
    "text", ["a\0b", "a\udc80b", "a\0\ud83d" * 3_000], ids=["nul", "half", "long"]
)
async def test_an_error_whose_text_no_store_could_hold_is_kept_readable(
    stage: Stage, text: str
) -> None:
    async def act(_: Job) -> Any:
        error = ValueError(f"it broke: {text}")
        error.code = f"Odd{text[:3]}"  # type: ignore[attr-defined]
        raise error

    (ended, runs) = await run(stage, act)
    assert ended.state == stage.words.failed
    assert runs <= 3
    assert b"it broke" in ended.error, ended.error
    assert (b"replaced" in ended.error) == (not text.isascii() or not holds_nul(stage))


async def test_news_that_no_store_could_hold_as_they_are_are_published(stage: Stage) -> None:
    async def act(job: Job) -> Any:
        await job.report({"at": "x\0y"}, "step\0\ud83d", type="odd", data={"t\0": ["\udc80"]})
        await job.log("a line\0 with \ud83d")
        for bad in (float("nan"), nested(1_000), object()):
            with pytest.raises((ValueError, TypeError)):
                job.report(data={"x": bad})
            with pytest.raises((ValueError, TypeError)):
                job.report(bad)

    ended, runs = await run(stage, act)
    assert (ended.state, runs) == (stage.words.done, 1), ended.error
    assert any(event.type == "odd" for event in await stage.ledger.events(ended.job_id))
