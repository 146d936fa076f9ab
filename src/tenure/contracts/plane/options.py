"""What a queue URL of the plane may say: at the database (`plane+sqlite`, `plane+postgresql`) and
at a worker (`plane+http`, `plane+https`)."""

from __future__ import annotations

import re

import msgspec

from tenure.contracts.plane.words import CONTRACT, queue_of
from tenure.core.errors import UsageError
from tenure.core.registry import check_least
from tenure.ledger.engine import PLANE
from tenure.ledger.settings import BoxOptions, BoxSettings

_STREAM = re.compile(r"[A-Za-z0-9_.:@-]{1,100}")


class PlaneOptions(BoxOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plane itself, over its database.

    `streams` are served in this order, the most urgent first. `redis` is the URL of a Redis whose
    streams carry the messages; without it the job's own row is its message. `resend_ms` is how long
    a message may be under way before the sweeper looks whether Redis still has it. `upkeep_ms` is
    how often a served plane reaps, promotes and sweeps beside its requests (0: never; claims still
    take back what stands in their way). `fair_every` makes every so many claims begin with another
    stream than the first, so that a full one cannot starve those behind it (0: never). `namespace`
    goes before the names of streams in Redis.
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
        if not stream_names(self.streams):
            raise UsageError("a plane serves at least one stream", contract=CONTRACT)

    @property
    def names(self) -> tuple[str, ...]:
        """The streams, the most urgent first."""
        return stream_names(self.streams)

    def settings(self, stream: str) -> BoxSettings:
        """How the box of one stream behaves."""
        return self.of_box(contract=CONTRACT, table=PLANE, queue=queue_of(stream))


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's side, over HTTP.

    `streams` empty asks for all that the plane serves. The key is the password of the URL, or the
    first line of `key_file`. `cafile` is a private authority for `plane+https`, `certfile` and
    `keyfile` a certificate of the worker's own. `answer_ms` is how long an answer may take beyond
    the time that the call itself may wait, `body_bytes_max` the largest request that the gateway
    takes.
    """

    streams: str = ""
    key_file: str = ""
    cafile: str = ""
    certfile: str = ""
    keyfile: str = ""
    answer_ms: int = 15_000
    body_bytes_max: int = 1 << 20

    def __post_init__(self) -> None:
        stream_names(self.streams)
        if self.body_bytes_max < 16_384:
            raise UsageError("body_bytes_max is at least 16384", contract=CONTRACT)
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
