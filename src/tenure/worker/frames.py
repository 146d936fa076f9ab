"""What worker and child process say to each other: length-prefixed MessagePack on a socket."""

from __future__ import annotations

import struct

import msgspec

from tenure.core.lease import Lease, Report
from tenure.core.outcome import Failure, OutcomeKind, Until
from tenure.core.retry import RetryPolicy

HEADER = struct.Struct("!I")


class Call(msgspec.Struct, frozen=True, tag=True):
    """Run this handler. `where` is module, file and qualified name; `chance` is for `judge`."""

    where: tuple[str, str, str]
    lease: Lease
    worker_id: str
    timeout_s: float | None
    retry: RetryPolicy | None
    chance: float


class Written(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `News`; if it was not written, `lost` or `refused` says why."""

    lost: str = ""
    refused: str = ""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The handler is imported and starts now: its timeout runs from here."""


class News(msgspec.Struct, frozen=True, tag=True):
    """A report of the handler."""

    report: Report


class Ended(msgspec.Struct, frozen=True, tag=True):
    """How it ended, judged in the child, where the exception is."""

    kind: OutcomeKind
    result: bytes
    failure: Failure | None
    delay_ms: int
    until: Until = ""


ToChild = Call | Written
FromChild = Begun | News | Ended

_encoder = msgspec.msgpack.Encoder()
read_to_child = msgspec.msgpack.Decoder(ToChild).decode
read_from_child = msgspec.msgpack.Decoder(FromChild).decode


def framed(message: ToChild | FromChild) -> bytes:
    """The bytes of one message."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body
