"""What a plane and its workers share: states, ids, URL options and the calls between them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from tenure.core.errors import LeaseLost, UsageError
from tenure.core.job import Children, NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.registry import check_least
from tenure.core.seam import Schedules, Upkeep
from tenure.sql.engine import PLANE, QueueSettings, SqlOptions

CONTRACT = "plane"
_QUEUE = "plane/"

STATES = {
    "": "",
    "queued": "QUEUED",
    "claimed": "RUNNING",
    "fetching": "RUNNING",
    "processing": "RUNNING",
    "uploading": "RUNNING",
    "succeeded": "SUCCEEDED",
    "failed": "FAILED",
    "dead_letter": "DLQ",
}
"""The contract's state for each state of the SQL tables. A running job of a plane has no stages."""


def queue_of(stream: str) -> str:
    """The SQL queue of a stream; its prefix keeps it apart from the inboxes of the database."""
    return _QUEUE + stream


def stream_of(queue: str) -> str:
    """The stream of an SQL queue."""
    return queue.removeprefix(_QUEUE)


def attempt_id_of(job_id: str, fence: int) -> str:
    """The id of one attempt.

    >>> attempt_id_of("7d", 3)
    '7d:3'
    """
    return f"{job_id}:{fence}"


def fence_of(job_id: str, attempt_id: str) -> int:
    """The fence in an attempt id; raises if it is not an attempt of this job."""
    owner, _, number = attempt_id.rpartition(":")
    if owner != job_id or not number.isdecimal() or not number.isascii() or len(number) > 18:
        raise UsageError(
            f"attempt_id {attempt_id[:160]!r} names no attempt of job {job_id[:140]!r}; send it as "
            "the claim gave it",
            contract=CONTRACT,
        )
    return int(number)


_STREAM = re.compile(r"[A-Za-z0-9_.:@-]{1,100}")


class PlaneOptions(SqlOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a plane at its database.

    `streams` are served in this order, the most urgent first. `redis` is the URL of a Redis whose
    streams carry the messages; without it a job's own row is its message. `resend_ms` is how long a
    message may be under way before upkeep checks whether Redis still has it. `upkeep_ms` is how
    often a served plane runs upkeep (0: never; claims still reclaim expired leases). `fair_every`:
    one of this many claims begins with another stream than the first, so that a full one does not
    starve the others (0: never). `namespace` is a prefix of the streams' names in Redis.
    """

    streams: str = "jobs"
    redis: str = ""
    namespace: str = ""
    lease_ms: int = 60_000
    resend_ms: int = 10_000
    upkeep_ms: int = 1_000
    fair_every: int = 0

    def __post_init__(self) -> None:
        self.check(CONTRACT)
        check_least(self, CONTRACT, fair_every=0)
        if not _stream_names(self.streams):
            raise UsageError("a plane serves at least one stream", contract=CONTRACT)

    @property
    def names(self) -> tuple[str, ...]:
        """The streams, the most urgent first."""
        return _stream_names(self.streams)

    def settings(self, stream: str) -> QueueSettings:
        """The settings of the queue of one stream."""
        return self.of_table(contract=CONTRACT, table=PLANE, queue=queue_of(stream))


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a worker over HTTP.

    Empty `streams` means all that the plane serves. The API key is the password of the URL, or the
    first line of `key_file`. `cafile` is a private authority for `plane+https`, `certfile` and
    `keyfile` are a client certificate. `answer_ms` is how long an answer may take beyond the time
    that the claim itself waits, `body_bytes_max` the largest request that the gateway accepts.
    """

    streams: str = ""
    key_file: str = ""
    cafile: str = ""
    certfile: str = ""
    keyfile: str = ""
    answer_ms: int = 15_000
    body_bytes_max: int = 1 << 20

    def __post_init__(self) -> None:
        _stream_names(self.streams)
        if self.body_bytes_max < 16_384:
            raise UsageError("body_bytes_max is at least 16384", contract=CONTRACT)
        if self.answer_ms < 100:
            raise UsageError("answer_ms is at least 100", contract=CONTRACT)

    @property
    def names(self) -> tuple[str, ...]:
        """The streams, the most urgent first; () for all."""
        return _stream_names(self.streams)


def _stream_names(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list, without repetitions."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if not _STREAM.fullmatch(name):
            raise UsageError(
                f"stream {name[:120]!r}: 1 to 100 of letters, digits and _ . : @ -",
                contract=CONTRACT,
            )
    return names


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim. `streams` () means all, in the plane's own order.

    `claim_id` is for sending the claim again: leases that were taken under it, or under one of
    `lost`, are answered first. `fresh` says that this claim was not sent before, which saves the
    plane a query. `looked` says that the streams were empty a moment ago. `is_allowed` says whether
    a claim that waited may still take jobs.
    """

    worker_id: str
    streams: tuple[str, ...] = ()
    limit: int = 1
    wait_ms: int = 0
    claim_id: str = ""
    lost: tuple[str, ...] = ()
    fresh: bool = False
    looked: bool = False
    requester: str = ""
    is_allowed: Callable[[], Awaitable[bool]] | None = None


class PlaneApi(Protocol):
    """The calls of a plane for workers and producers."""

    schedules: Schedules

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; `options["stream"]` says where, else it is the first stream."""

    async def claim(self, claim: Claim) -> list[Lease]:
        """Take leases; a lease's `queue` is its stream and its `handle` the message."""

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Keep leases alive."""

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Store reports."""

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases."""

    async def children(self, lease: Lease) -> Children:
        """The results of the jobs that a running job waited for."""

    async def upkeep(self, worker_id: str, *, slots: int = 0) -> Upkeep:
        """Run a round of upkeep; `slots` is how many jobs the worker runs at once (0: unknown)."""

    async def close(self) -> None:
        """Close the connections."""


def warn(text: str, **facts: object) -> None:
    """Log a warning. The logger is imported late: a program that only reads does not need it."""
    import structlog

    structlog.get_logger("tenure.plane").warning(text, **facts)
