"""The lease: an exclusive, expiring right to execute a job; and reports of its holder."""

from __future__ import annotations

import msgspec


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one job, held until `lease_until_ms` on the store's clock.

    `fence` rises with every claim of the job and `token` proves the claim to the store; together
    they guard every later write. `lease_ms` is how long the lease lasts from the moment it was
    requested, so that the holder knows by its own clock when to stop. `handle` is the contract's
    own reference (a stream entry id, a message id). `payload` is raw JSON. `cancel_requested` is
    set on the answer to an extend when a cancel was requested. `ttl_ms` is the job's own time to
    live, within which it has to be started; 0 if it has none.
    `requester` is the API key that submitted the job and `webhook_url` where an event of an outbox
    goes, "" where the contract has none. `extra` is private to the queue that made the lease.
    """

    job_id: str
    queue: str
    task: str
    payload: bytes
    attempt: int
    max_attempts: int
    fence: int
    token: str
    lease_until_ms: int
    lease_ms: int
    created_ms: int = 0
    handle: str = ""
    gid: str = ""
    priority: int = 0
    trace: str = ""
    ttl_ms: int = 0
    cancel_requested: bool = False
    requester: str = ""
    webhook_url: str = ""
    extra: object = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A report of a running attempt: an event of `type` for followers, and progress if any.

    `data` and `progress` are JSON. The store writes it only while the lease is held. `payload`
    replaces the job's own, in queues with the feature `replaces_payload`, without an event.
    """

    lease: Lease
    type: str = "progress"
    step: str = ""
    data: bytes = b"{}"
    progress: bytes = b""
    payload: bytes = b""


class WorkerId(str):
    """The id of a worker, unique among all processes. `name` is its part for people.

    Most contracts need the unique id. One that is `named_by_host` takes the name of the pod or host
    as it is, and fences its writes by other means.
    """

    __slots__ = ("name",)

    name: str

    def __new__(cls, unique: str, name: str = "") -> WorkerId:
        made = super().__new__(cls, unique)
        made.name = name or unique
        return made
