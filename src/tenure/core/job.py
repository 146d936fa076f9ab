"""What a job is before it is stored, what the store answers, and how it looks when read back.

Payloads travel as JSON bytes: only code that needs the value decodes it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

SubmitStatus = Literal["created", "replayed", "conflict", "full", "invalid"]


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job to be stored.

    `job_id` makes a resent submit harmless: the store answers with the job it already has.
    `idempotency_key` does the same for callers that do not choose ids, within one `requester`.
    `max_attempts` counts starts; None leaves it to the contract's own default.
    `options` holds what only one contract knows.
    """

    task: str
    payload: bytes
    job_id: str = ""
    idempotency_key: str = ""
    requester: str = ""
    priority: int = 0
    delay_ms: int = 0
    max_attempts: int | None = None
    ttl_ms: int | None = None
    gid: str = ""
    trace: str = ""
    options: dict[str, Any] = {}


class Submitted(msgspec.Struct, frozen=True):
    """What became of one `NewJob`; any `status` but created or replayed wrote nothing.

    `job_id` is the stored job, which for a replay is the earlier one; a refusal has none ("").
    `reason` explains it. `created_ms` is set where the store tells its time of a job just created,
    `response` where it keeps the answer that the first request with this idempotency key got.
    """

    job_id: str
    status: SubmitStatus
    reason: str = ""
    retry_after_ms: int = 0
    created_ms: int = 0
    response: str = ""

    @property
    def accepted(self) -> bool:
        """True when the job is in the store, now or from before."""
        return self.status in ("created", "replayed")


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A stored job as the ledger shows it, in the contract's own state words."""

    job_id: str
    contract: str
    queue: str
    task: str
    state: str
    payload: bytes = b"null"
    result: bytes = b""
    error: bytes = b""
    attempt: int = 0
    max_attempts: int = 0
    fence: int = 0
    created_ms: int = 0
    updated_ms: int = 0
    due_ms: int = 0
    lease_until_ms: int = 0
    ttl_ms: int = 0
    priority: int = 0
    gid: str = ""
    worker_id: str = ""
    requester: str = ""
    progress: bytes = b""
    trace: str = ""
    extra: dict[str, Any] = {}


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a single job's own event stream; `event_id` orders them and resumes a reader."""

    event_id: str
    type: str
    ts_ms: int
    step: str = ""
    data: bytes = b"{}"
