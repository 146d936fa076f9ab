"""Words for the suite's tests: submit, claim, settle, in one line each."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import msgspec

from tenure.core.errors import StoreError
from tenure.core.job import JobRecord, NewJob
from tenure.core.lease import Lease
from tenure.core.outcome import Failure, Outcome, OutcomeKind, Verdict
from tenure.core.seam import Queue
from tests.contract.adapters import Stage

DEADLINE_S = 10.0
_numbers = itertools.count(1)

FAILURE = Failure(code="Broken", message="it broke")


def job(job_id: str = "", **fields: Any) -> NewJob:
    """A job with an id of its own and a payload that names it."""
    job_id = job_id or f"job-{next(_numbers)}"
    fields.setdefault("payload", msgspec.json.encode({"job": job_id}))
    return NewJob(job_id=job_id, task=fields.pop("task", "work"), **fields)


async def submit(queue: Queue, *jobs: NewJob) -> list[str]:
    """Submit jobs that must be accepted; their ids."""
    answers = await queue.submit(jobs)
    assert [answer.status for answer in answers] == ["created"] * len(jobs), answers
    return [answer.job_id for answer in answers]


async def claim(queue: Queue, count: int = 1) -> list[Lease]:
    """Exactly `count` leases, however many claims that takes."""
    leases: list[Lease] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(leases) < count:
        leases += await queue.claim(count - len(leases), wait_ms=20)
        assert time.monotonic() < deadline_s, f"{len(leases)} of {count} leases in {DEADLINE_S} s"
    return leases


def ordered(stage: Stage, job_ids: list[str]) -> list[str]:
    """The ids in their order, or sorted if the queue has no order over all of its jobs."""
    return sorted(job_ids) if "one_order" in stage.cannot else job_ids


async def claim_one(queue: Queue) -> Lease:
    """One lease."""
    (lease,) = await claim(queue)
    return lease


async def settle(queue: Queue, lease: Lease, kind: OutcomeKind, **fields: Any) -> Verdict:
    """End one lease."""
    if kind in ("fail", "retry", "bury"):
        fields.setdefault("failure", FAILURE)
    (verdict,) = await queue.settle([Outcome(lease, kind, **fields)])
    return verdict


async def run_out(stage: Stage) -> None:
    """Let every lease run out that is held now."""
    await stage.advance(stage.lease_ms + 1)


async def claim_when_due(stage: Stage, queue: Queue, delay_ms: int, began_s: float) -> Lease:
    """The lease of a job that was put off at `began_s` (monotonic): not before it is due.

    On a store with a clock of its own, a slow machine may bring it at the first claim.
    """
    early = await queue.claim(1, wait_ms=0)
    if early:
        assert time.monotonic() - began_s >= delay_ms / 1000, "claimed before it was due"
        return early[0]
    await stage.advance(delay_ms + 1)
    return await claim_one(queue)


async def record(stage: Stage, job_id: str) -> JobRecord:
    """The stored job, which must be there."""
    found = await stage.ledger.get(job_id)
    assert found is not None, f"{job_id} is not in the ledger"
    return found


async def state(stage: Stage, job_id: str) -> str:
    """The stored job's state, in the contract's words."""
    return (await record(stage, job_id)).state


async def nothing_to_claim(queue: Queue) -> bool:
    """Whether a claim that waits a moment brings nothing."""
    return await queue.claim(100, wait_ms=30) == []


async def answered(call: Any) -> Any:
    """The answer of a call that is made again until the store answers it."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return await call()
        except StoreError:
            assert time.monotonic() < deadline_s, "the store does not answer"
            await asyncio.sleep(0)
