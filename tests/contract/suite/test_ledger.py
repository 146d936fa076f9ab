"""Ledger: find, count, send back, remove."""

from collections import Counter

import pytest

from tenure.core.seam import Query
from tests.contract.adapters import Stage
from tests.contract.stages import Staffed, Staffing
from tests.contract.suite.acting import (
    claim,
    claim_one,
    job,
    nothing_to_claim,
    record,
    settle,
    state,
    submit,
)


@pytest.mark.clause("M-20")
async def test_counts_say_how_many_jobs_are_in_which_state(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, *[job(max_attempts=3) for _ in range(6)], job(delay_ms=60_000))
    leases = await claim(queue, 4)
    await settle(queue, leases[0], "complete")
    await settle(queue, leases[1], "bury")
    await settle(queue, leases[2], "cancel")
    counts = await stage.ledger.counts()
    words = stage.words
    # Counted, because a contract may have one word for failed and cancelled.
    expected = Counter(words.of("waiting", "waiting", "waiting", "running"))
    expected += Counter(words.of("done", "failed", "cancelled"))
    assert {name: counts.states[name] for name in expected} == expected
    assert counts.workers == 1
    assert not counts.paused


@pytest.mark.clause("M-20")
async def test_jobs_are_found_newest_first_in_pages(stage: Stage) -> None:
    queue = stage.queue("w1")
    ids = []
    for n in range(7):
        ids += await submit(queue, job(f"page-{n}"))
        await stage.advance(2)  # so that no two of them share a millisecond
    found: list[str] = []
    after = ""
    while True:
        page = await stage.ledger.find(Query(limit=3, after=after))
        found += [each.job_id for each in page.jobs]
        after = page.after
        if not after:
            break
    assert found == ids[::-1]


@pytest.mark.clause("M-20")
async def test_jobs_are_found_by_state_and_task(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, job("f1", task="draw"), job("f2", task="draw"), job("f3", task="read"))
    lease = await claim_one(queue)
    await settle(queue, lease, "complete")
    done = await stage.ledger.find(Query(states=(stage.words.done,)))
    waiting_draws = await stage.ledger.find(Query(states=(stage.words.waiting,), task="draw"))
    assert [each.job_id for each in done.jobs] == [lease.job_id]
    assert {each.job_id for each in waiting_draws.jobs} == {"f1", "f2"} - {lease.job_id}


@pytest.mark.clause("M-19")
async def test_a_finished_job_is_sent_back_with_all_its_attempts(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=1))
    await settle(queue, await claim_one(queue), "bury")
    assert await stage.ledger.retry([job_id]) == ["ok"]
    stored = await record(stage, job_id)
    assert (stored.state, stored.attempt, stored.error) == (stage.words.waiting, 0, b"")
    lease = await claim_one(queue)
    assert (lease.attempt, lease.fence) == (1, 2)
    await settle(queue, lease, "complete")


@pytest.mark.clause("M-19")
async def test_only_a_finished_job_is_sent_back(stage: Stage) -> None:
    queue = stage.queue("w1")
    running, waiting = await submit(queue, job(), job())
    await claim_one(queue)
    answers = await stage.ledger.retry([waiting, running, "no-such-job"])
    assert "ok" not in answers
    assert all(answers)


@pytest.mark.clause("M-19")
async def test_a_job_that_nobody_runs_is_removed(stage: Stage) -> None:
    queue = stage.queue("w1")
    (running,) = await submit(queue, job())
    lease = await claim_one(queue)
    waiting, delayed = await submit(queue, job(), job(delay_ms=60_000))
    answers = await stage.ledger.remove([running, waiting, delayed, "no-such-job"])
    assert answers[1:3] == ["ok", "ok"]
    assert "ok" not in (answers[0], answers[3])
    assert await stage.ledger.get(waiting) is None
    assert await state(stage, running) == stage.words.running
    assert await nothing_to_claim(queue)
    await settle(queue, lease, "complete")
    assert await stage.ledger.remove([running]) == ["ok"]


async def test_an_unknown_job_is_not_there(stage: Stage) -> None:
    assert await stage.ledger.get("no-such-job") is None


@pytest.mark.clause("M-20")
async def test_a_worker_that_has_nothing_to_do_is_known_all_the_same(stage: Stage) -> None:
    assert isinstance(stage.ledger, Staffed)
    assert await stage.ledger.workers() == []
    queue = stage.queue("w1")
    assert await queue.claim(1, wait_ms=0) == []
    await queue.upkeep()
    (beat,) = await stage.ledger.workers()
    assert beat.worker_id == "w1"
    assert beat.last_ms > 0
    assert beat.slots == 0, "nobody said how many"


@pytest.mark.clause("M-20")
async def test_a_worker_says_how_many_jobs_it_runs_at_once(stage: Stage) -> None:
    """And it stays known, whatever else of it the store keeps."""
    assert isinstance(stage.ledger, Staffed)
    queue = stage.queue("w1")
    assert isinstance(queue, Staffing)
    queue.slots = 7
    await queue.upkeep()
    await submit(queue, job())
    lease = await claim_one(queue)
    await settle(queue, lease, "complete")
    (beat,) = await stage.ledger.workers()
    assert (beat.worker_id, beat.slots) == ("w1", 7)
    queue.slots = 3
    await queue.upkeep()
    (beat,) = await stage.ledger.workers()
    assert beat.slots == 3
