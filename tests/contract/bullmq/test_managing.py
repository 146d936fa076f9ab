"""A queue as a whole: ranges of jobs, schedulers, figures, and its end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tenure.contracts.bullmq import MACHINE, Flow, SchedulerRecord
from tenure.core.errors import Conflict, NotFound, UsageError
from tenure.core.journal import HistoryChecker, JournalEvent
from tenure.core.outcome import Failure, Outcome
from tests.contract.bullmq.conftest import Bench

pytestmark = pytest.mark.clause("B-57")


async def test_jobs_of_states_are_listed_by_range(bench: Bench) -> None:
    producer, ledger = bench.producer(), bench.ledger()
    ids = [await producer.add("work", {"n": n}) for n in range(5)]
    late = [await producer.add("work", delay=60_000 + n) for n in range(3)]
    shown = await ledger.jobs("waiting", start=1, end=3)
    assert [job.job_id for job in shown] == ids[3:0:-1]
    shown = await ledger.jobs("waiting", start=1, end=3, ascending=True)
    assert [job.job_id for job in shown] == ids[1:4]
    assert [job.job_id for job in await ledger.jobs("waiting", start=3, ascending=True)] == ids[3:]
    both = await ledger.jobs("delayed", "waiting", end=0)
    assert [(job.job_id, job.state) for job in both] == [(late[2], "delayed"), (ids[4], "waiting")]
    with pytest.raises(UsageError, match="states"):
        await ledger.jobs("sleeping")


async def test_schedulers_are_listed_with_their_templates(bench: Bench) -> None:
    producer, ledger = bench.producer(), bench.ledger()
    began = int(time.time() * 1000)
    await producer.upsert_scheduler(
        "nightly", pattern="0 3 1 1 *", tz="Europe/Berlin", name="report", data={"a": 1}, limit=9
    )
    options = {"attempts": 3, "fail_parent_on_failure": True}
    await producer.upsert_scheduler("tick", every=60_000, options=options)
    tick, nightly = await ledger.schedulers()
    assert (tick.scheduler_id, tick.every, tick.name, tick.iterations) == (
        "tick",
        60_000,
        "tick",
        1,
    )
    assert tick.options == {"attempts": 3, "failParentOnFailure": True}
    assert nightly == SchedulerRecord(
        scheduler_id="nightly",
        name="report",
        next_ms=nightly.next_ms,
        iterations=1,
        pattern="0 3 1 1 *",
        tz="Europe/Berlin",
        limit=9,
        data={"a": 1},
    )
    assert nightly.next_ms > began
    assert await ledger.schedulers(start=1) == [nightly]


async def test_metrics_count_what_finished(bench: Bench) -> None:
    queue, ledger = bench.queue(metrics_minutes=5), bench.ledger()
    for _ in range(3):
        await bench.producer().add("work")
    leases = await queue.claim(3, wait_ms=1_000)
    failure = Failure(code="x", message="y")
    await queue.settle([Outcome(leases[0], "complete"), Outcome(leases[1], "complete")])
    await queue.settle([Outcome(leases[2], "bury", failure=failure)])
    bench.raw.rpush(bench.key("metrics:completed:data"), 4, 7, 1)
    told = await ledger.metrics(end=1)
    assert (told.count, told.points, told.length) == (2, [4, 7], 3)
    assert (await ledger.metrics("failed")).count == 1
    with pytest.raises(UsageError, match="completed and failed"):
        await ledger.metrics("waiting")


async def test_events_are_trimmed_and_a_deduplication_key_is_given_back(bench: Bench) -> None:
    producer, ledger = bench.producer(), bench.ledger()
    first = await producer.add("work", deduplication={"id": "one"})
    assert await producer.add("work", deduplication={"id": "one"}) == first
    assert await ledger.remove_deduplication_key("one") is True
    assert await ledger.remove_deduplication_key("one") is False
    assert await producer.add("work", deduplication={"id": "one"}) != first
    await producer.add_bulk([("work", {}, {})] * 300)
    assert await ledger.trim_events(0) > 300
    assert len(bench.events()) < 200


@pytest.mark.clause("B-56")
async def test_the_data_of_a_job_is_replaced_from_outside(bench: Bench) -> None:
    job_id = await bench.producer().add("work", {"n": 1})
    await bench.ledger().update_data(job_id, {"n": 2})
    assert bench.hash(job_id)["data"] == '{"n":2}'
    with pytest.raises(NotFound):
        await bench.ledger().update_data("nobody", {})


async def test_obliterate_leaves_nothing_but_the_history(bench: Bench) -> None:
    queue, producer, ledger = bench.queue(metrics_minutes=5), bench.producer(), bench.ledger()
    await producer.add_bulk([("work", {}, {})] * 700)
    await producer.add("work", priority=2)
    await producer.add("work", delay=60_000)
    await producer.add("work", deduplication={"id": "one"})
    await producer.upsert_scheduler("tick", every=60_000)
    leases = await queue.claim(2, wait_ms=1_000)
    await queue.settle([Outcome(leases[0], "complete")])
    with pytest.raises(Conflict, match="jobs run in it"):
        await ledger.obliterate()
    await ledger.obliterate(force=True)
    left = {each.decode() for each in bench.raw.scan_iter(f"bull:{bench.name}:*")}
    assert left == {bench.key("tenure:journal")}
    events = await sound_history(bench)
    assert sum(event.type == "remove" for event in events) == 704
    await producer.add("work")
    assert len(await ledger.jobs("waiting")) == 1


@pytest.mark.clause("B-17", "B-22", "B-47")
@pytest.mark.parametrize("options", [{}, {"priority": 3}, {"delay": 60_000}])
async def test_the_history_of_a_parent_that_its_child_failed_is_sound(
    bench: Bench, options: dict[str, Any]
) -> None:
    queue, producer = bench.queue(), bench.producer()
    mother = await producer.add("mother", attempts=2, **options)
    await producer.add_children(
        mother, [Flow(name="child", options={"jobId": "child", "failParentOnFailure": True})]
    )
    leases = {lease.job_id: lease for lease in await queue.claim(5, wait_ms=1_000)}
    if mother in leases:  # it runs: its completion is forbidden, and an attempt is left
        await queue.settle([Outcome(leases[mother], "complete")])
    failure = Failure(code="x", message="y")
    await queue.settle([Outcome(leases["child"], "bury", failure=failure)])
    assert await queue.claim(5, wait_ms=0) == []
    assert bench.hash(mother)["failedReason"] == f"child {bench.key('child')} failed"
    assert sorted(bench.ids("failed")) == sorted([mother, "child"])
    await sound_history(bench)


async def sound_history(bench: Bench) -> list[JournalEvent]:
    """The whole journal, in which no step is missing or against the rules."""
    journal, after, events = bench.journal(), "", list[JournalEvent]()
    while entries := await journal.read(after=after, limit=1_000):
        events += entries
        after = entries[-1].seq
    checker = HistoryChecker(MACHINE, whole=True)
    for index, event in enumerate(events):
        checker.add(index, event)
    checker.finish(quiesced=True)
    assert checker.violations == []
    return events
