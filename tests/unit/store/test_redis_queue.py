"""What the Redis contracts share: order of answers, place of refusals, bounded input."""

import re
from collections.abc import Sequence

import pytest

from tenure.core.errors import ReplyLost, StoreUnreachable, UsageError
from tenure.core.job import NewJob, Submitted
from tenure.core.outcome import COMPLETED, Failure, Retried, verdict_of
from tenure.core.seam import Quarantined, Query
from tenure.store.redis_queue import (
    Quarantine,
    check_query,
    error_code,
    fields_of,
    in_batches,
    number,
    safe_worker_id,
    submit_valid,
)


async def test_batches_are_bounded_and_their_answers_keep_the_order() -> None:
    sizes: list[int] = []

    async def send(batch: Sequence[int]) -> list[int]:
        sizes.append(len(batch))
        return [each * 2 for each in batch]

    assert await in_batches(range(7), send, size=3) == [0, 2, 4, 6, 8, 10, 12]
    assert sizes == [3, 3, 1]
    assert await in_batches([], send) == []


async def test_a_store_that_goes_away_between_two_batches_may_have_executed_the_call() -> None:
    async def send(batch: Sequence[int]) -> Sequence[int]:
        if batch[0]:
            raise StoreUnreachable("gone")
        return batch

    with pytest.raises(ReplyLost):
        await in_batches([0, 1], send, size=1)
    with pytest.raises(StoreUnreachable):
        await in_batches([1], send, size=1)


async def test_a_refused_job_keeps_its_place_among_the_answers() -> None:
    def encode(job: NewJob) -> str:
        if job.task == "bad":
            raise UsageError("no such task")
        return job.task

    async def send(tasks: Sequence[str]) -> list[Submitted]:
        return [Submitted(task, "created") for task in tasks]

    jobs = [NewJob(task=task, payload=b"{}") for task in ("a", "bad", "b")]
    answers = await submit_valid(jobs, encode, send)
    assert [(each.job_id, each.status) for each in answers] == [
        ("a", "created"),
        ("", "invalid"),
        ("b", "created"),
    ]
    assert answers[1].reason == "no such task"


def test_without_a_reader_the_quarantine_keeps_the_latest_records() -> None:
    quarantine = Quarantine()
    for at in range(1_002):
        quarantine.add(b"job-%d" % at, b"bad \xff")
    taken = quarantine.take()
    assert len(taken) == 1_000
    assert taken[-1] == Quarantined("job-1001", "bad \ufffd")
    assert quarantine.take() == []


@pytest.mark.parametrize(
    ("raw", "value"),
    [(b"12", 12), (b"1e+3", 1000), (b"", 0), (None, 0), (b"x", 0), (b"inf", 0), (b"nan", 0)],
)
def test_a_number_of_another_program_is_read_or_counts_as_none(
    raw: bytes | None, value: int
) -> None:
    assert number(raw) == value


def test_a_query_names_known_states_and_a_cursor_that_a_page_gave() -> None:
    cursor = re.compile(r"[0-9]+:.+")
    check_query(Query(states=("wait",), after="12:a"), ("wait", "done"), cursor, "omniq")
    with pytest.raises(UsageError, match="no such state: gone; there are wait, done"):
        check_query(Query(states=("gone",)), ("wait", "done"), cursor, "omniq")
    with pytest.raises(UsageError, match="is not a cursor"):
        check_query(Query(after="a"), ("wait", "done"), cursor, "omniq")


def test_words_of_scripts_and_for_scripts() -> None:
    assert verdict_of("retry", 7) == Retried(7)
    assert verdict_of("complete") is COMPLETED
    assert error_code(Failure(code="a b\tc" + "x" * 100, message="")) == "abc" + "x" * 77
    assert safe_worker_id('w 1"') == "w-1-"
    assert safe_worker_id("").startswith("anon-")
    assert fields_of([b"a", b"1"]) == {"a": b"1"}
    assert fields_of(None) == {}
