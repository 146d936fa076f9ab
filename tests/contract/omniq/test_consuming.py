"""The consumer: what a handler is given, how it ends, and how the consumer does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest

from tenure.contracts.omniq import JobContext
from tenure.core.outcome import Fatal, Snooze
from tests.contract.omniq.conftest import Bench
from tests.waiting import until

DEADLINE_S = 20.0


async def _consume(bench: Bench, handler: Any, holds: Any, **settings: Any) -> None:
    """Consume until a condition holds, then end as told."""
    stop = asyncio.Event()
    settings.setdefault("concurrency", 4)
    consuming = asyncio.create_task(
        bench.client.consume(bench.name, handler, stop=stop, signals=False, **settings)
    )
    try:
        await until(lambda: holds() or consuming.done(), within_s=DEADLINE_S)
    finally:
        stop.set()
        await asyncio.wait_for(consuming, DEADLINE_S)


@pytest.mark.clause("O-44", "O-42")
async def test_a_handler_is_given_the_whole_context(bench: Bench) -> None:
    await bench.publish({"a": [1, "é"]}, job_id="j", gid="g", timeout_ms=9_000)
    seen: list[JobContext] = []

    async def handler(ctx: JobContext) -> None:
        seen.append(ctx)

    await _consume(bench, handler, lambda: bench.ids("completed") == ["j"])
    (ctx,) = seen
    assert (ctx.queue, ctx.job_id, ctx.gid, ctx.attempt) == (bench.name, "j", "g", 1)
    assert (ctx.payload_raw, ctx.payload) == ('{"a":[1,"é"]}', {"a": [1, "é"]})
    assert len(ctx.lease_token) >= 32
    assert ctx.lock_until_ms == int(bench.hash("j")["first_started_ms"]) + 9_000


@pytest.mark.clause("O-42")
async def test_plain_handlers_run_in_threads_side_by_side(bench: Bench) -> None:
    await bench.publish(*[{}] * 4)
    meeting = threading.Barrier(4)

    def handler(ctx: JobContext) -> None:
        meeting.wait(DEADLINE_S)  # passes only when four of them run at once

    await _consume(bench, handler, lambda: len(bench.ids("completed")) == 4)


@pytest.mark.clause("O-42")
async def test_what_a_handler_raises_decides_how_the_job_ends(bench: Bench) -> None:
    endings: dict[str, BaseException] = {
        "boom": ValueError("boom"),
        "exit": SystemExit(3),
        "fatal": Fatal("no way"),
        "snooze": Snooze(60),
    }
    for name in endings:
        await bench.publish({"name": name}, job_id=name, max_attempts=2, backoff_ms=60_000)

    async def handler(ctx: JobContext) -> None:
        raise endings[ctx.payload["name"]]

    await _consume(bench, handler, lambda: not bench.ids("active") and not bench.ids("wait"))
    assert sorted(bench.ids("delayed")) == ["boom", "exit", "snooze"]
    assert bench.ids("failed") == ["fatal"]
    assert bench.hash("boom")["last_error"] == "ValueError: boom"
    assert bench.hash("snooze")["attempt"] == "0"


@pytest.mark.clause("O-42")
async def test_a_job_longer_than_its_lease_is_kept_and_runs_once(bench: Bench) -> None:
    await bench.publish({}, job_id="long", timeout_ms=150)
    starts = 0

    async def handler(ctx: JobContext) -> None:
        nonlocal starts
        starts += 1
        await asyncio.sleep(0.6)  # the handler's work: four leases

    await _consume(bench, handler, lambda: bench.ids("completed") == ["long"])
    assert starts == 1
    assert "extend" in [event.type for event in await bench.history()]


@pytest.mark.clause("O-42")
async def test_due_jobs_run_while_a_long_handler_runs(bench: Bench) -> None:
    release = asyncio.Event()
    ran: list[str] = []
    await bench.publish({}, job_id="long")

    async def handler(ctx: JobContext) -> None:
        ran.append(ctx.job_id)
        if ctx.job_id == "long":
            await bench.publish({}, job_id="due", due_ms=bench.client.now_ms() + 100)
            await release.wait()
        else:
            release.set()

    await _consume(bench, handler, lambda: len(bench.ids("completed")) == 2)
    assert ran == ["long", "due"]


@pytest.mark.clause("O-46")
@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_lost_lease_reaches_the_handler_and_nothing_is_written(
    bench: Bench, kind: str
) -> None:
    await bench.publish({}, job_id="j", timeout_ms=60_000)
    heard = threading.Event()

    async def waits(ctx: JobContext) -> None:
        try:
            await asyncio.sleep(DEADLINE_S)
        except asyncio.CancelledError:
            assert ctx.lost.is_set()
            heard.set()
            raise

    def listens(ctx: JobContext) -> None:
        if ctx.lost.wait(DEADLINE_S):
            heard.set()

    def steal() -> bool:
        if bench.ids("active") and bench.hash("j")["lease_token"] != "another":
            bench.raw.hset(bench.key("job:j"), "lease_token", "another")
        return heard.is_set()

    handler = waits if kind == "async" else listens
    await _consume(bench, handler, steal, beat_s=0.05)
    assert bench.hash("j")["state"] == "active"


@pytest.mark.clause("O-45")
async def test_draining_finishes_what_runs(bench: Bench) -> None:
    ids = await bench.publish(*[{}] * 3)
    begun = asyncio.Event()

    async def handler(ctx: JobContext) -> None:
        begun.set()
        await asyncio.sleep(0.2)  # the handler's work

    await _consume(bench, handler, begun.is_set, concurrency=1)
    assert bench.ids("completed") == ids[:1]
    assert bench.ids("wait") == ids[1:]


@pytest.mark.clause("O-45")
async def test_not_draining_hands_back_what_ran_at_once(bench: Bench) -> None:
    ids = await bench.publish(*[{}] * 3)
    begun = threading.Event()

    def handler(ctx: JobContext) -> None:
        begun.set()
        ctx.lost.wait(DEADLINE_S)

    began = time.monotonic()
    await _consume(bench, handler, begun.is_set, concurrency=2, drain=False)
    assert time.monotonic() - began < 5
    assert bench.ids("wait") == ids
    assert bench.ids("active") == []
    assert {bench.hash(each)["attempt"] for each in ids} == {"0"}


@pytest.mark.clause("O-45")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("drain", [True, False])
async def test_a_signal_ends_the_consumer_as_it_was_told(
    bench: Bench, number: signal.Signals, drain: bool
) -> None:
    (job_id,) = await bench.publish({})
    code = f"""
        import asyncio, time
        from tenure.contracts.omniq import Client
        def handler(ctx):
            print("begun", flush=True)
            time.sleep({1.5 if drain else 60})
        async def main():
            async with Client({bench.server!r}) as client:
                await client.consume({bench.name!r}, handler, drain={drain})
        asyncio.run(main())
    """
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        # A job that was claimed and not begun is handed back: the signal comes after its beginning.
        assert program.stdout is not None
        await asyncio.to_thread(program.stdout.readline)
        program.send_signal(number)
        _, errors = await asyncio.to_thread(program.communicate, timeout=DEADLINE_S)
    finally:
        program.kill()
    assert program.returncode == 0, errors.decode()
    assert bench.ids("completed") == ([job_id] if drain else [])
    assert bench.ids("wait") == ([] if drain else [job_id])


@pytest.mark.clause("O-42")
async def test_a_cancel_that_is_asked_for_ends_the_handler(bench: Bench) -> None:
    await bench.publish({}, job_id="j")
    begun = asyncio.Event()

    async def handler(ctx: JobContext) -> None:
        begun.set()
        await asyncio.sleep(DEADLINE_S)

    ledger = bench.ledger()

    async def ask() -> None:
        await begun.wait()
        assert await ledger.cancel(["j"]) == ["requested"]

    asking = asyncio.create_task(ask())
    await _consume(bench, handler, lambda: bench.ids("failed") == ["j"], beat_s=0.05)
    await asking
    assert bench.hash("j")["last_error"] == "cancelled"


async def test_a_consumer_without_slots_is_refused(bench: Bench) -> None:
    with pytest.raises(ValueError, match="concurrency"):
        await bench.client.consume(bench.name, print, concurrency=0, signals=False)
