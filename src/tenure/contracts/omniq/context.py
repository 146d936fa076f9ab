"""What a handler of `consume` is given, and what a handler is."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec

from tenure.contracts.omniq.executing import Exec
from tenure.core.encoding import from_json
from tenure.core.lease import Lease


class JobContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler is given. `lost` is set when the lease is gone: stop, nothing counts.

    `exec` publishes, pauses and counts children on the same server.
    """

    queue: str
    job_id: str
    payload_raw: str
    payload: Any
    attempt: int
    max_attempts: int
    lock_until_ms: int
    lease_token: str
    gid: str
    lost: threading.Event
    exec: Exec


Handler: TypeAlias = Callable[[JobContext], Awaitable[Any] | Any]


def context_of(lease: Lease, tools: Exec) -> JobContext:
    """The context of one attempt."""
    raw = lease.payload.decode(errors="replace")
    try:
        payload = from_json(lease.payload)
    except msgspec.DecodeError:
        payload = raw  # another client stored it so; the handler shall see what is there
    return JobContext(
        queue=lease.queue,
        job_id=lease.job_id,
        payload_raw=raw,
        payload=payload,
        attempt=lease.attempt,
        max_attempts=lease.max_attempts,
        lock_until_ms=lease.lease_until_ms,
        lease_token=lease.token,
        gid=lease.gid,
        lost=threading.Event(),
        exec=tools,
    )
