"""What a queue URL of the plane may say: at the database (`plane+sqlite`, `plane+postgresql`) and
at a worker (`plane+http`, `plane+https`)."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from leasehold.contracts.plane.words import CONTRACT, queue_of
from leasehold.core.errors import UsageError
from leasehold.ledger.engine import PLANE
from leasehold.ledger.settings import BoxSettings

_STREAM = re.compile(r"[A-Za-z0-9_.:@-]{1,100}")


class PlaneOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plane itself, over its database.

    `streams` are served in this order, the most urgent first. `redis` is the URL of a Redis whose
    streams carry the messages; without it the job's own row is its message. `lost_max` is how often
    the lease of one job may run out. `keep_ms` is how long ended jobs are kept (0: for ever).
    `resend_ms` is how long a message may be under way before the sweeper looks whether Redis still
    has it. `upkeep_ms` is how often a served plane reaps, promotes and sweeps beside its requests
    (0: never; claims still take back what stands in their way). `namespace` goes before the names
    of streams in Redis.
    """

    streams: str = "jobs"
    schema: str = "leasehold"
    redis: str = ""
    namespace: str = ""
    lease_ms: int = 60_000
    max_attempts: int = 5
    retry_delay_ms: int = 1_000
    lost_max: int = 5
    depth_max: int = 0
    idempotency_ttl_s: int = 86_400
    keep_ms: int = 0
    journal_days: float = 30.0
    resend_ms: int = 10_000
    upkeep_ms: int = 1_000
    synchronous: Literal["full", "normal"] = "full"

    def __post_init__(self) -> None:
        for name, least in (("lease_ms", 50), ("max_attempts", 1), ("lost_max", 1), ("keep_ms", 0)):
            value = getattr(self, name)
            if value < least:
                raise UsageError(
                    f"{name} is {value}; it must be at least {least}", contract=CONTRACT
                )
        if not stream_names(self.streams):
            raise UsageError("a plane serves at least one stream", contract=CONTRACT)

    @property
    def names(self) -> tuple[str, ...]:
        """The streams, the most urgent first."""
        return stream_names(self.streams)

    def settings(self, stream: str) -> BoxSettings:
        """How the box of one stream behaves."""
        return BoxSettings(
            contract=CONTRACT,
            table=PLANE,
            queue=queue_of(stream),
            lease_ms=self.lease_ms,
            max_attempts=self.max_attempts,
            lost_max=self.lost_max,
            depth_max=self.depth_max,
            idempotency_ms=self.idempotency_ttl_s * 1000,
            keep_ms=self.keep_ms,
            journal_ms=round(self.journal_days * 86_400_000),
        )

    def engine(self, store: str, *, pinned: bool) -> dict[str, Any]:
        """What the database is told."""
        if store.startswith("postgres"):
            return {"schema": self.schema, "pinned": pinned, "synchronous": self.synchronous}
        return {"synchronous": self.synchronous}


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's side, over HTTP.

    `streams` empty asks for all that the plane serves. The key is the password of the URL, or the
    first line of `key_file`. `cafile` is a private authority for `plane+https`, `certfile` and
    `keyfile` a certificate of the worker's own. `answer_ms` is how long an answer may take beyond
    the time that the call itself may wait.
    """

    streams: str = ""
    key_file: str = ""
    cafile: str = ""
    certfile: str = ""
    keyfile: str = ""
    answer_ms: int = 15_000

    def __post_init__(self) -> None:
        stream_names(self.streams)
        if self.answer_ms < 100:
            raise UsageError("answer_ms is at least 100", contract=CONTRACT)

    @property
    def names(self) -> tuple[str, ...]:
        """The streams, the most urgent first; () for all."""
        return stream_names(self.streams)


def stream_names(text: str) -> tuple[str, ...]:
    """The names in a list with commas, without repetitions."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        check_stream(name)
    return names


def check_stream(name: str) -> None:
    """Refuse what cannot be the name of a stream."""
    if not _STREAM.fullmatch(name):
        raise UsageError(
            f"stream {name[:120]!r}: 1 to 100 of letters, digits and _ . : @ -", contract=CONTRACT
        )
