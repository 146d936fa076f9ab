"""Reading a queue: job records, a job's children, jobs by state, the event stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from tenure.contracts.bullmq.options import CONTRACT, Options, keys, read_options
from tenure.core.encoding import from_json
from tenure.core.errors import JobFailed, ServerError
from tenure.core.job import JobEvent, JobRecord, position
from tenure.store.redis import Arg, Redis

_EXACT_MAX = 2**53


def _record_of(
    job_id: str, queue: str, state: str, raw: dict[bytes, bytes], *, due_ms: int = 0
) -> JobRecord:
    """The record of a job whose place in the queue is known."""

    def text(name: bytes) -> str:
        return raw.get(name, b"").decode(errors="replace")

    def count(name: bytes) -> int:
        return number(raw.get(name, b""))

    options = read_options(raw.get(b"opts", b"{}"))
    made, stalled = count(b"atm"), count(b"stc")
    created = count(b"timestamp")
    own = raw.get(b"tn", b"").split(b" ")  # see head.lua
    lease_until = number(own[2]) if len(own) == 6 else 0
    return JobRecord(
        job_id=job_id,
        contract=CONTRACT,
        queue=queue,
        task=text(b"name"),
        state=state,
        payload=raw.get(b"data", b"null"),
        result=raw.get(b"returnvalue", b""),
        error=_error(raw, cancelled=len(own) == 6 and own[4] == b"cancel"),
        attempt=made + stalled + (state == "active"),
        max_attempts=options.attempts + stalled if options.attempts else 0,
        fence=count(b"ats"),
        created_ms=created,
        updated_ms=count(b"finishedOn") or count(b"processedOn") or created,
        due_ms=due_ms,
        lease_until_ms=lease_until if state == "active" else 0,
        priority=count(b"priority"),
        worker_id=text(b"workerId") or text(b"pb"),
        progress=raw.get(b"progress", b""),
        trace=options.trace,
        extra=_extra(raw, made, stalled),
    )


def number(raw: bytes | int) -> int:
    """A number that another program may have written carelessly."""
    try:
        value = int(float(raw)) if raw else 0
    except (ValueError, OverflowError):
        return 0
    return value if abs(value) <= _EXACT_MAX else 0


def _error(raw: dict[bytes, bytes], *, cancelled: bool) -> bytes:
    """What BullMQ keeps of a failure, as JSON: the reason, and the stack of the last attempt.

    BullMQ has no state for cancelled jobs: those that our own scripts ended are told by the code.
    """
    reason = raw.get(b"failedReason")
    if reason is None:
        return b""
    try:
        stacks = msgspec.json.decode(raw.get(b"stacktrace", b"[]"))
    except (msgspec.DecodeError, RecursionError):
        stacks = []
    stack = stacks[-1] if isinstance(stacks, list) and stacks else ""
    shown = {
        "message": reason.decode(errors="replace"),
        "stack": stack,
        "code": "cancelled" if cancelled else _error_name(str(stack)),
    }
    return msgspec.json.encode(shown)


def _error_name(stack: str) -> str:
    """The error's name: the first word of a Node stack, the last line's of a Python one."""
    lines = [line for line in stack.strip().splitlines() if line]
    if not lines:
        return ""
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return line.partition(":")[0].strip()[:80]


def _extra(raw: dict[bytes, bytes], made: int, stalled: int) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "attemptsMade": made,  # B-2: BullMQ's own name for it, read from `atm`
        "stalledCounter": stalled,
        "cancel_requested": raw.get(b"cancel") == b"1",
    }
    for field in (b"parentKey", b"rjk", b"deid", b"defa"):
        if field in raw:
            extra[field.decode()] = raw[field].decode(errors="replace")
    return extra


class Children(msgspec.Struct, frozen=True, kw_only=True):
    """The children of a job by their keys, such as `bull:scenes:17`.

    `results` of those that completed, `failures` (the reasons) of those that failed and were to be
    ignored, `fatal` those whose failure fails the parent, `pending` those that have not ended.
    """

    results: dict[str, Any]
    failures: dict[str, str]
    fatal: list[str]
    pending: list[str]

    def __bool__(self) -> bool:
        """Whether there are any, in whatever state."""
        return bool(self.results or self.failures or self.fatal or self.pending)


async def read_children(redis: Redis, key: str) -> Children:
    """What the four keys beside a parent's hash say."""
    processed, failed, unsuccessful, pending = await redis.pipeline(
        [
            ("HGETALL", f"{key}:processed"),
            ("HGETALL", f"{key}:failed"),
            ("ZRANGE", f"{key}:unsuccessful", 0, -1),
            ("SMEMBERS", f"{key}:dependencies"),
        ]
    )
    return Children(
        results={key: json_or_text(raw) for key, raw in _pairs(processed)},
        failures={key: raw.decode(errors="replace") for key, raw in _pairs(failed)},
        fatal=[key.decode() for key in unsuccessful],
        pending=sorted(key.decode() for key in pending),
    )


def _pairs(flat: Any) -> list[tuple[str, bytes]]:
    return [(key.decode(), raw) for key, raw in zip(flat[::2], flat[1::2], strict=True)]


def json_or_text(raw: bytes | None) -> Any:
    """A JSON value, or the text of what is none; None where there is nothing."""
    try:
        return from_json(raw) if raw is not None else None
    except msgspec.DecodeError:
        return raw.decode(errors="replace") if raw is not None else None


STATES = (
    *("waiting", "prioritized", "delayed", "active", "waiting-children", "completed", "failed"),
    "paused",
)
LISTS = ("active", "waiting", "paused")
"""The states whose key is a list; those of the others are sorted sets."""
_SETS = ("completed", "failed", "delayed", "prioritized", "waiting-children")
_SCAN_MAX = 20_000
_CHUNK = 500
_SLOTS = 4096  # a due time's score is ms * 4096 + its place within the millisecond


def state_keys(key_prefix: str) -> dict[str, str]:
    """The key of each state."""
    named = keys(key_prefix)._asdict()
    return {state: named[_KEY_OF.get(state, state)] for state in STATES}


_KEY_OF = {"waiting": "wait", "waiting-children": "waiting_children"}


class Finder:
    """Reads the jobs of one queue."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._prefix = options.key_prefix
        self._queue = options.queue
        self._keys = state_keys(options.key_prefix)

    async def newest(self, states: Sequence[str], after: str) -> dict[str, str]:
        """The jobs in these states that come after a cursor, newest first, each with its state.

        BullMQ has no index by time: the ids of the states are read up to a bound, and of each the
        time alone. Whole records, and their places, are for the few that are shown.
        """
        listed = await self.between(states, 0, _SCAN_MAX - 1)
        ids = list(listed)
        times: list[tuple[tuple[int, tuple[int, str]], str]] = []
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            commands = [("HGET", self._prefix + job_id, "timestamp") for job_id in chunk]
            stamps = await self._redis.pipeline(commands)
            times += [
                ((number(stamp), _natural(job_id)), job_id)
                for job_id, stamp in zip(chunk, stamps, strict=True)
                if isinstance(stamp, bytes)
            ]
        if after:
            created, _, last_id = after.partition(":")
            last = (int(created), _natural(last_id))
            times = [each for each in times if each[0] < last]
        times.sort(reverse=True)
        return {job_id: listed[job_id] for _, job_id in times}

    async def between(
        self, states: Sequence[str], start: int, end: int, *, ascending: bool = False
    ) -> dict[str, str]:
        """The jobs of each state between two places, each with its state.

        A list begins with its newest job, a set with the one that is due, or ended, first.
        """
        commands: list[tuple[Arg, ...]] = []
        for state in states:
            key = self._keys[state]
            if state not in LISTS:
                commands.append(("ZRANGE" if ascending else "ZREVRANGE", key, start, end))
            elif ascending:
                commands.append(("LRANGE", key, -(end + 1) if end >= 0 else 0, -start - 1))
            else:
                commands.append(("LRANGE", key, start, end))
        listed: dict[str, str] = {}
        for state, reply in zip(states, await self._redis.pipeline(commands), strict=True):
            if isinstance(reply, ServerError):  # of another type: upkeep puts it aside
                continue
            ids = reversed(reply) if ascending and state in LISTS else reply
            listed |= {job_id: state for each in ids if (job_id := text_of(each))}
        return listed

    async def records(
        self, ids: Sequence[str], listed: Mapping[str, str] | None = None
    ) -> list[JobRecord | None]:
        """Hash and place of each job; the places are asked for in the same go.

        `listed` says where jobs were a moment ago: then no list is searched for them, which takes
        as long as the list is.
        """
        searched = _SETS if listed is not None else (*_SETS, *LISTS)
        places = [("LPOS" if s in LISTS else "ZSCORE", self._keys[s], s) for s in searched]
        found: list[JobRecord | None] = []
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            commands: list[tuple[Arg, ...]] = []
            for job_id in chunk:
                commands.append(("HGETALL", self._prefix + job_id))
                commands += [(command, key, job_id) for command, key, _ in places]
            replies = iter(await self._redis.pipeline(commands))
            for job_id in chunk:
                flat = next(replies)
                places_found = [(state, next(replies)) for _, _, state in places]
                otherwise = "unknown" if listed is None else listed[job_id]
                found.append(self._record(job_id, flat, places_found, otherwise))
        return found

    def _record(
        self, job_id: str, flat: Any, places_found: list[tuple[str, Any]], otherwise: str
    ) -> JobRecord | None:
        if not isinstance(flat, list):
            return None  # the key is no hash
        raw: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
        if not raw.get(b"name"):
            return None
        if otherwise == "unknown" and raw.get(b"finishedOn"):
            otherwise = "failed" if b"failedReason" in raw else "completed"
        there = ((state, place) for state, place in places_found if isinstance(place, bytes | int))
        state, place = next(there, (otherwise, b"0"))
        due_ms = number(place) // _SLOTS if state == "delayed" else 0
        return _record_of(job_id, self._queue, state, raw, due_ms=due_ms)


def _natural(job_id: str) -> tuple[int, str]:
    """Ids that BullMQ counts are ordered as numbers."""
    return (int(job_id), "") if job_id.isdecimal() and len(job_id) < 20 else (-1, job_id)


def text_of(job_id: bytes) -> str:
    """An id as text; "" for one that is no text, which no client of BullMQ makes."""
    try:
        return job_id.decode()
    except UnicodeDecodeError:
        return ""


_JSON_FIELDS = ("returnvalue", "data")


class Event(msgspec.Struct, frozen=True):
    """One event: its `name` ("completed"), the job if it is about one, and its other fields.

    Fields that hold JSON by BullMQ's rules (`returnvalue`, `data`) are decoded.
    """

    id: str
    name: str
    job_id: str
    fields: dict[str, Any]


class QueueEvents:
    """Follows the events of one queue, for one event loop."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._key = keys(options.key_prefix).events
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
        return True, json_or_text(result)


def read_events(entries: list[Any], job_id: str) -> list[JobEvent]:
    """The stream entries about one job, as events of the seam."""
    events = []
    wanted = job_id.encode()
    for seq, flat in entries:
        if wanted not in flat:  # most are about others, and taking one apart costs more than a look
            continue
        raw = dict(zip(flat[::2], flat[1::2], strict=True))
        if raw.get(b"jobId") == wanted:
            events.append(_job_event(seq, raw))
    return events


def events_by_job(entries: list[Any], cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
    """The stream entries about some jobs, each after its own position."""
    after = {job_id.encode(): (job_id, position(cursor)) for job_id, cursor in cursors.items()}
    found: dict[str, list[JobEvent]] = {}
    for seq, flat in entries:
        raw = dict(zip(flat[::2], flat[1::2], strict=True))
        wanted = after.get(raw.get(b"jobId", b""))
        if wanted is not None and position(seq.decode()) > wanted[1]:
            found.setdefault(wanted[0], []).append(_job_event(seq, raw))
    return found


def _job_event(seq: bytes, raw: dict[bytes, bytes]) -> JobEvent:
    return JobEvent(
        event_id=seq.decode(),
        type=raw.get(b"event", b"").decode(errors="replace"),
        ts_ms=number(raw.get(b"timestamp") or seq.split(b"-")[0]),
        step=raw.get(b"step", b"").decode(errors="replace"),
        data=_data(raw),
    )


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
        fields[key] = json_or_text(value) if key in _JSON_FIELDS else value.decode(errors="replace")
    return Event(seq.decode(), fields.pop("event", ""), fields.pop("jobId", ""), fields)
