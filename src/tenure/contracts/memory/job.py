"""A job of the memory contract: whether it may be stored, how it is stored and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from tenure.core.errors import UsageError
from tenure.core.job import JobEvent, JobRecord, NewJob, check_job, request_hash, scoped_key
from tenure.core.journal import JournalEvent
from tenure.core.lease import Lease
from tenure.core.outcome import Verdict
from tenure.core.state import Machine

MACHINE = Machine(
    contract="memory",
    initial=("waiting",),
    running=("running",),
    final=("done", "failed", "cancelled"),
    cancelled=("cancelled",),
    steps={
        "waiting": ("running", "failed", "cancelled"),
        "running": ("waiting", "done", "failed", "cancelled"),
    },
    reopen={"done": ("waiting",), "failed": ("waiting",), "cancelled": ("waiting",)},
)

_LEAST = {
    "lease_ms": 1,
    "max_attempts": 1,
    "depth_max": 0,
    "retry_delay_ms": 0,
    "keep_ms": 0,
    "journal_events_max": 1,
}


class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one memory queue; two URLs of the same name may not contradict each other.

    `depth_max` 0 means no limit. `retry_delay_ms` is the wait before a run that the store itself
    decided on (outcome "fail"). `keep_ms` is how long a finished job stays readable.
    """

    lease_ms: int = 15_000
    max_attempts: int = 3
    depth_max: int = 0
    retry_delay_ms: int = 0
    keep_ms: int = 86_400_000
    journal_events_max: int = 1_000_000

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is at least {least}, not {getattr(self, name)}")


class ClaimId(msgspec.Struct, frozen=True):
    """One claim: which instance calls, its number, the last of its claims that was answered.

    An instance has one claim in flight at a time; its numbers rise.
    """

    instance: str
    number: int
    received: int


@dataclass(slots=True)
class StoredJob:
    """One job with its whole state. `place` orders those that wait; `fence` and `ver` only rise.

    `closed` has, by fence, how its latest leases ended: a hash of the settle and its verdict.
    """

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
    closed: dict[int, tuple[str, Verdict]] = field(default_factory=dict)
    events: list[JobEvent] = field(default_factory=list)

    def outlived(self, now_ms: int) -> bool:
        """A time to live counts until the first start (M-6)."""
        never_ran = self.state == "waiting" and self.attempt == 0
        return never_ran and bool(self.ttl_ms) and now_ms >= self.created_ms + self.ttl_ms

    def lease(self, now_ms: int) -> Lease:
        """The lease as its holder sees it; `lease_ms` is what is left of it now."""
        return Lease(lease_ms=self.lease_until_ms - now_ms, **self._shown(Lease))

    def record(self) -> JobRecord:
        """The job as the ledger shows it."""
        extra = {"cancel_requested": True} if self.cancel_requested else {}
        return JobRecord(contract="memory", extra=extra, **self._shown(JobRecord))

    def _shown(self, shape: type[msgspec.Struct]) -> dict[str, Any]:
        own = self.__slots__
        return {name: getattr(self, name) for name in shape.__struct_fields__ if name in own}


EVENT_FIELDS = tuple(
    name
    for name in JournalEvent.__struct_fields__
    if name in StoredJob.__slots__ and name != "queue"
)


def request_h_of(new: NewJob) -> str:
    """What makes two submits the same: everything but the ids and the trace."""
    return request_hash(
        new.requester,
        new.task,
        msgspec.json.decode(new.payload),
        new.priority,
        new.delay_ms,
        new.max_attempts,
        new.ttl_ms,
        new.gid,
        new.options,
    )


def invalid(new: NewJob) -> str:
    """Why no store could take this job (M-5); "" when it can."""
    if new.ttl_ms is not None and new.ttl_ms <= 0:
        return f"ttl_ms is positive or left out, not {new.ttl_ms}"
    try:
        check_job(new)
        msgspec.json.decode(new.payload)
        if new.idempotency_key:
            scoped_key(new.requester, new.idempotency_key)
    except msgspec.DecodeError as error:
        return f"the payload is not JSON: {error}"
    except UsageError as error:
        return str(error)
    return ""
