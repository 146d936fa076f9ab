"""The queue's events, as every BullMQ client sees them: a stream of what happened to jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tenure.contracts.bullmq.options import Options, keys
from tenure.contracts.bullmq.records import number
from tenure.core.encoding import from_json
from tenure.core.errors import TenureError
from tenure.core.job import JobEvent
from tenure.store.redis import Redis

_JSON_FIELDS = ("returnvalue", "data")


class Event(msgspec.Struct, frozen=True):
    """One event: its `name` ("completed"), the job if it is about one, and its other fields.

    Fields that hold JSON by BullMQ's rules (`returnvalue`, `data`) are decoded.
    """

    id: str
    name: str
    job_id: str
    fields: dict[str, Any]


class JobFailed(TenureError):
    """A job that somebody waited for has failed; the message is its reason."""

    code = "job_failed"


class QueueEvents:
    """Follows the events of one queue, for one event loop."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._key = keys(options.key_prefix)[6]
        self._prefix = options.key_prefix

    async def read(self, *, after: str = "", wait_ms: int = 0, limit: int = 1_000) -> list[Event]:
        """Events after a position ("" for the oldest kept); waits for the first if asked to."""
        if wait_ms <= 0:
            start = f"({after}" if after else "-"
            entries = await self._redis.call("XRANGE", self._key, start, "+", "COUNT", limit)
            return [_event(entry) for entry in entries]
        reply = await self._redis.block(
            "XREAD", "COUNT", limit, "BLOCK", wait_ms, "STREAMS", self._key, after or "0-0",
            wait_ms=wait_ms,
        )  # fmt: skip
        return [_event(entry) for entry in reply[0][1]] if reply else []

    async def follow(self, *, after: str = "$", wait_ms: int = 10_000) -> AsyncIterator[Event]:
        """Every event from now on, or after a position, for ever."""
        if after == "$":
            after = await self.last()
        while True:
            for event in await self.read(after=after, wait_ms=wait_ms):
                after = event.id
                yield event

    async def last(self) -> str:
        """The position of the newest event."""
        entries = await self._redis.call("XREVRANGE", self._key, "+", "-", "COUNT", 1)
        return entries[0][0].decode() if entries else "0-0"

    async def finished(self, job_id: str, *, timeout_ms: int = 30_000) -> Any:
        """The result of a job when it has one; raises `JobFailed`, or `TimeoutError`."""
        async with asyncio.timeout(timeout_ms / 1000):
            after = await self.last()
            found, ended = await self._end_of(job_id)
            if found:
                return ended
            async for event in self.follow(after=after):
                if event.job_id != job_id:
                    continue
                if event.name == "completed":
                    return event.fields.get("returnvalue")
                if event.name == "failed":
                    raise JobFailed(str(event.fields.get("failedReason", "")), contract="bullmq")
        raise AssertionError("a followed stream does not end")

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    async def _end_of(self, job_id: str) -> tuple[bool, Any]:
        fields = ("finishedOn", "failedReason", "returnvalue")
        ended, reason, result = await self._redis.call("HMGET", self._prefix + job_id, *fields)
        if ended is None:
            return False, None
        if result is None and reason is not None:
            raise JobFailed(reason.decode(errors="replace"), contract="bullmq")
        return True, _json(result)


def read_events(entries: list[Any], job_id: str) -> list[JobEvent]:
    """The entries about one job, in the seam's words."""
    events = []
    wanted = job_id.encode()
    for seq, flat in entries:
        if wanted not in flat:  # most are about others, and taking one apart costs more than a look
            continue
        raw = dict(zip(flat[::2], flat[1::2], strict=True))
        if raw.get(b"jobId") != wanted:
            continue
        stamp = raw.get(b"timestamp") or seq.split(b"-")[0]
        events.append(
            JobEvent(
                event_id=seq.decode(),
                type=raw.get(b"event", b"").decode(errors="replace"),
                ts_ms=number(stamp),
                step=raw.get(b"step", b"").decode(errors="replace"),
                data=_data(raw),
            )
        )
    return events


def _data(raw: dict[bytes, bytes]) -> bytes:
    """What an event says besides its job: the handler's own JSON, or the fields as an object."""
    for field in (b"info", b"data"):
        if field in raw:
            return raw[field]
    if b"returnvalue" in raw:
        return b'{"result":' + raw[b"returnvalue"] + b"}"
    rest = {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in raw.items()
        if name not in (b"event", b"jobId", b"timestamp", b"step")
    }
    return msgspec.json.encode(rest)


def _event(entry: list[Any]) -> Event:
    seq, flat = entry
    fields: dict[str, Any] = {}
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        key = name.decode(errors="replace")
        fields[key] = _json(value) if key in _JSON_FIELDS else value.decode(errors="replace")
    return Event(seq.decode(), fields.pop("event", ""), fields.pop("jobId", ""), fields)


def _json(raw: bytes | None) -> Any:
    try:
        return from_json(raw) if raw is not None else None
    except msgspec.DecodeError:
        return raw.decode(errors="replace") if raw is not None else None
