"""Batches: answers in order, and one bad item harms no other."""

import msgspec
import pytest

from tenure.core.errors import LeaseLost
from tenure.core.lease import Lease, Report
from tenure.core.outcome import COMPLETED, Completed, Outcome, Retried
from tests.contract.adapters import Stage
from tests.contract.suite.acting import FAILURE, claim, job, state, submit

pytestmark = pytest.mark.clause("M-2", "M-11")


async def test_one_bad_item_of_a_settle_harms_no_neighbour(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, *[job(max_attempts=3) for _ in range(4)])
    leases = await claim(queue, 4)
    ids = [lease.job_id for lease in leases]
    forged = msgspec.structs.replace(leases[1], fence=99)
    outcomes = [
        Outcome(leases[0], "complete", b"1"),
        Outcome(forged, "complete", b"2"),
        Outcome(leases[2], "retry", failure=FAILURE, delay_ms=60_000),
        Outcome(leases[3], "complete", b"4"),
    ]
    verdicts = await queue.settle(outcomes)
    assert [type(verdict) for verdict in verdicts] == [Completed, LeaseLost, Retried, Completed]
    words = stage.words
    expected = [words.done, words.running, words.waiting, words.done]
    assert [await state(stage, job_id) for job_id in ids] == expected


async def test_one_bad_item_of_an_extend_or_report_harms_no_neighbour(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, *[job() for _ in range(3)])
    leases = await claim(queue, 3)
    ids = [lease.job_id for lease in leases]
    leases[1] = msgspec.structs.replace(leases[1], token="somebody-else")
    extended = await queue.extend(leases)
    assert [type(answer) for answer in extended] == [Lease, LeaseLost, Lease]
    assert [answer.job_id for answer in extended] == ids
    reported = await queue.report([Report(lease=lease, progress=b"50") for lease in leases])
    assert [type(answer) for answer in reported] == [type(None), LeaseLost, type(None)]
    progress = [(await stage.ledger.get(job_id)).progress for job_id in ids]  # type: ignore[union-attr]
    assert progress == [b"50", b"", b"50"]


async def test_the_same_lease_twice_in_one_settle_ends_once(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, job())
    (lease,) = await claim(queue, 1)
    both = await queue.settle([Outcome(lease, "complete", b"1"), Outcome(lease, "complete", b"1")])
    assert both == [COMPLETED, COMPLETED]
    ends = [event for event in await stage.journal.read() if event.type == "complete"]
    assert len(ends) == 1


@pytest.mark.options(lease_ms=60_000)
async def test_a_settle_of_six_hundred_is_answered_one_by_one(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, *[job() for _ in range(600)])
    leases = await claim(queue, 600)
    verdicts = await queue.settle([Outcome(lease, "complete") for lease in leases])
    assert verdicts == [COMPLETED] * 600
    assert (await stage.ledger.counts()).states[stage.words.done] == 600


async def test_empty_batches_are_answered_with_nothing(stage: Stage) -> None:
    queue = stage.queue("w1")
    assert await queue.submit([]) == []
    assert await queue.extend([]) == []
    assert await queue.report([]) == []
    assert await queue.settle([]) == []
