"""A job as the memory store holds it, and the three ways in which it is shown."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenure.core.job import JobEvent, JobRecord
from tenure.core.lease import Lease
from tenure.core.outcome import Verdict

CONTRACT = "memory"


@dataclass(frozen=True, slots=True)
class Closed:
    """How a lease ended: enough to answer a resent settle with the same verdict."""

    token: str
    outcome_h: str
    verdict: Verdict


@dataclass(slots=True)
class StoredJob:
    """One job with its whole state. `place` orders the line; `fence` and `ver` only ever rise."""

    job_id: str
    queue: str
    task: str
    payload: bytes
    request_h: str
    created_ms: int
    max_attempts: int
    requester: str = ""
    key: str = ""
    priority: int = 0
    gid: str = ""
    trace: str = ""
    ttl_ms: int = 0
    retry_delay_ms: int = 0
    state: str = ""
    place: int = 0
    due_ms: int = 0
    updated_ms: int = 0
    attempt: int = 0
    fence: int = 0
    ver: int = 0
    token: str = ""
    worker_id: str = ""
    lease_until_ms: int = 0
    cancel_requested: bool = False
    result: bytes = b""
    error: bytes = b""
    progress: bytes = b""
    closed: dict[int, Closed] = field(default_factory=dict)
    events: list[JobEvent] = field(default_factory=list)

    def outlived(self, now_ms: int) -> bool:
        """A time to live counts until the first start (M-6)."""
        never_ran = self.state == "waiting" and self.attempt == 0
        return never_ran and bool(self.ttl_ms) and now_ms >= self.created_ms + self.ttl_ms

    def lease(self, now_ms: int) -> Lease:
        """The lease as its holder sees it; `lease_ms` is what is left of it now."""
        return Lease(
            job_id=self.job_id,
            queue=self.queue,
            task=self.task,
            payload=self.payload,
            attempt=self.attempt,
            max_attempts=self.max_attempts,
            fence=self.fence,
            token=self.token,
            lease_until_ms=self.lease_until_ms,
            lease_ms=self.lease_until_ms - now_ms,
            created_ms=self.created_ms,
            gid=self.gid,
            priority=self.priority,
            trace=self.trace,
            cancel_requested=self.cancel_requested,
        )

    def record(self) -> JobRecord:
        """The job as the ledger shows it."""
        return JobRecord(
            job_id=self.job_id,
            contract=CONTRACT,
            queue=self.queue,
            task=self.task,
            state=self.state,
            payload=self.payload,
            result=self.result,
            error=self.error,
            attempt=self.attempt,
            max_attempts=self.max_attempts,
            fence=self.fence,
            created_ms=self.created_ms,
            updated_ms=self.updated_ms,
            due_ms=self.due_ms,
            lease_until_ms=self.lease_until_ms,
            ttl_ms=self.ttl_ms,
            priority=self.priority,
            gid=self.gid,
            worker_id=self.worker_id,
            requester=self.requester,
            progress=self.progress,
            trace=self.trace,
            extra={"cancel_requested": True} if self.cancel_requested else {},
        )
