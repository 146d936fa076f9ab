"""A small outbox on the seam: events of one job are handed out one at a time and in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tenure.core.errors import LeaseLost
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import BURIED, COMPLETED, Outcome, Retried, Verdict
from tenure.core.seam import QueueFeatures, Upkeep


@dataclass
class Shelf:
    """What all views of the outbox share: per job the events that wait, and which jobs are free."""

    events: dict[str, deque[tuple[str, tuple[str, bytes]]]] = field(default_factory=dict)
    free: deque[str] = field(default_factory=deque)
    attempts: dict[str, int] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)
    left: int = 0

    def add(self, job_id: str, event_id: str, payload: tuple[str, bytes]) -> None:
        line = self.events.setdefault(job_id, deque())
        if not line:
            self.free.append(job_id)
        line.append((event_id, payload))
        self.left += 1


class Outbox:
    """One view of the shelf; satisfies the seam's `Queue` as far as a worker needs it."""

    slots = 0
    features = QueueFeatures()

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        raise AssertionError("events are put on the shelf by the test")

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        shelf = self._shelf
        if not shelf.free:
            await asyncio.sleep(min(wait_ms, 5) / 1000)
        leases = []
        while shelf.free and len(leases) < limit:
            job_id = shelf.free.popleft()
            event_id, (url, body) = shelf.events[job_id][0]
            attempt = shelf.attempts[event_id] = shelf.attempts.get(event_id, 0) + 1
            leases.append(
                Lease(
                    job_id=event_id,
                    queue="outbox",
                    task="deliver",
                    payload=body,
                    requester="acme",
                    webhook_url=url,
                    attempt=attempt,
                    max_attempts=10,
                    fence=attempt,
                    token="",
                    lease_until_ms=0,
                    lease_ms=30_000,
                    gid=job_id,
                )
            )
        return leases

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        return list(leases)

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        return [None] * len(reports)

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        return [self._settle(outcome) for outcome in outcomes]

    def _settle(self, outcome: Outcome) -> Verdict:
        shelf, job_id = self._shelf, outcome.lease.gid
        if outcome.kind in ("retry", "snooze", "release"):
            loop = asyncio.get_running_loop()
            loop.call_later(outcome.delay_ms / 1000, shelf.free.append, job_id)
            return Retried()
        event_id, _ = shelf.events[job_id].popleft()
        shelf.left -= 1
        if shelf.events[job_id]:
            shelf.free.append(job_id)
        if outcome.kind == "complete":
            return COMPLETED
        shelf.dead.append(event_id)
        return BURIED

    async def upkeep(self) -> Upkeep:
        return Upkeep()

    async def close(self) -> None:
        pass


def delivery(url: str, event_id: str, job_id: str, seq: int) -> tuple[str, bytes]:
    body = {"event_id": event_id, "job_id": job_id, "seq": seq, "status": "processing"}
    return url, msgspec.json.encode(body)
