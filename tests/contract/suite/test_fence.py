"""Fence: whoever lost the lease is told so, and changes nothing."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tenure.core.errors import LeaseLost
from tenure.core.lease import Report
from tenure.core.outcome import COMPLETED
from tests.contract.adapters import Stage
from tests.contract.suite.acting import claim_one, job, record, run_out, settle, submit

pytestmark = pytest.mark.clause("M-11")

JournalOf = Callable[[str], Any]


@pytest.mark.leases_run_out
async def test_a_stale_worker_is_told_it_lost_the_lease(
    stage: Stage, journal_of: JournalOf
) -> None:
    slow, quick = stage.queue("slow"), stage.queue("quick")
    (job_id,) = await submit(slow, job(max_attempts=5))
    stale = await claim_one(slow)
    await run_out(stage)
    current = await claim_one(quick)
    assert current.fence == stale.fence + 1
    before = await record(stage, job_id)
    changes = [event for event in await journal_of(job_id) if event.ver]

    (extended,) = await slow.extend([stale])
    (reported,) = await slow.report([Report(lease=stale, progress=b"99")])
    settled = [await settle(slow, stale, kind) for kind in ("complete", "retry", "bury", "release")]

    assert all(isinstance(answer, LeaseLost) for answer in (extended, reported, *settled))
    assert await record(stage, job_id) == before
    assert [event for event in await journal_of(job_id) if event.ver] == changes
    assert await settle(quick, current, "complete", result=b'"right"') == COMPLETED
    assert (await record(stage, job_id)).result == b'"right"'


@pytest.mark.leases_run_out
async def test_the_old_lease_of_the_same_worker_is_stale_too(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, job(max_attempts=5))
    stale = await claim_one(queue)
    await run_out(stage)
    current = await claim_one(queue)
    assert isinstance(await settle(queue, stale, "complete", result=b'"old"'), LeaseLost)
    assert await settle(queue, current, "complete", result=b'"new"') == COMPLETED


async def test_a_lease_cannot_be_made_up(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    lease = await claim_one(queue)
    forged = [
        msgspec.structs.replace(lease, token="somebody-else"),
        msgspec.structs.replace(lease, fence=lease.fence + 1),
        msgspec.structs.replace(lease, fence=0),
        msgspec.structs.replace(lease, job_id="no-such-job"),
    ]
    for each in forged:
        assert isinstance(await settle(queue, each, "complete"), LeaseLost)
        (extended,) = await queue.extend([each])
        assert isinstance(extended, LeaseLost)
    assert (await record(stage, job_id)).state == stage.words.running
    assert await settle(queue, lease, "complete") == COMPLETED


async def test_a_lease_ends_with_its_settle(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, job())
    lease = await claim_one(queue)
    await settle(queue, lease, "complete")
    (extended,) = await queue.extend([lease])
    (reported,) = await queue.report([Report(lease=lease)])
    assert isinstance(extended, LeaseLost)
    assert isinstance(reported, LeaseLost)


async def test_the_lease_of_a_reopened_job_is_not_valid_again(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    old = await claim_one(queue)
    await settle(queue, old, "bury")
    assert await stage.ledger.retry([job_id]) == ["ok"]
    new = await claim_one(queue)
    assert new.fence > old.fence
    assert isinstance(await settle(queue, old, "complete"), LeaseLost)
    assert await settle(queue, new, "complete") == COMPLETED


@pytest.mark.needs("reject_event")
async def test_every_refusal_leaves_an_event_that_changes_nothing(
    stage: Stage, journal_of: JournalOf
) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    lease = await claim_one(queue)
    forged = msgspec.structs.replace(lease, token="somebody-else")
    await queue.extend([forged])
    await queue.report([Report(lease=forged)])
    await settle(queue, forged, "complete")
    rejects = [event for event in await journal_of(job_id) if event.type == "reject"]
    assert [event.ver for event in rejects] == [0, 0, 0]
    assert [event.data for event in rejects] == ["extend", "report", "settle"]
