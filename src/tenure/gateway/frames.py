"""Server-sent events as bytes. Pure: no clock, no store, no connection."""

from __future__ import annotations

import msgspec

from tenure.core.encoding import answer_json
from tenure.core.job import JobEvent

HEARTBEAT = b": heartbeat\n\n"
_LINE_ENDS = str.maketrans("\r\n\0", "   ")


class Hello(msgspec.Struct, frozen=True):
    """The `data` of the first frame."""

    job_id: str
    status: str


def hello(job_id: str, state: str, retry_ms: int) -> bytes:
    """The first frame: whose events these are, and how soon to come back after a break."""
    data = msgspec.json.encode(Hello(job_id, state))
    return b"retry: %d\nevent: hello\ndata: %b\n\n" % (retry_ms, data)


def frame(event: JobEvent) -> bytes:
    """One event. Its id is the position from which a client goes on."""
    return b"id: %b\n%b" % (event.event_id.encode(), unnumbered(event))


def unnumbered(event: JobEvent) -> bytes:
    """One event that the job's own stream does not hold: it moves nobody's position."""
    news = {"type": event.type, "ts": event.ts_ms, "step": event.step, "data": _data(event.data)}
    name = event.type.translate(_LINE_ENDS).encode()
    return b"event: %b\ndata: %b\n\n" % (name, msgspec.json.encode(news))


def comment(text: str, *, retry_ms: int = 0) -> bytes:
    """A line for people who watch the wire; with `retry_ms`, when to come back."""
    retry = b"retry: %d\n" % retry_ms if retry_ms else b""
    return b"%b: %b\n\n" % (retry, text.translate(_LINE_ENDS).encode())


def position(event_id: str) -> tuple[int, ...]:
    """An event id as something that can be compared.

    >>> position("1700000000000-10") > position("1700000000000-9") > position("")
    True
    """
    return tuple(int(part) for part in event_id.split("-")) if event_id else ()


def _data(raw: bytes) -> object:
    """Made anew, because a frame must have no line break and must be JSON."""
    return answer_json(raw) if raw else {}
