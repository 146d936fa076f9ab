"""Reading a queue: job records, a job's children, jobs by state, the event stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from tenure.contracts.bullmq.options import CONTRACT, Options, keys, read_options
from tenure.core.encoding import from_json
from tenure.core.errors import JobFailed
from tenure.core.job import Children, JobEvent, JobRecord, position
from tenure.core.journal import JournalEvent
from tenure.plans.flow import step_of
from tenure.store.redis import Arg, Redis
from tenure.store.redis_queue import fields_of, number, read_all

STATES = (
    *("waiting", "prioritized", "delayed", "active", "waiting-children", "completed", "failed"),
    "paused",
)
LISTS = ("active", "waiting", "paused")
"""The states whose key is a list; the keys of the others are sorted sets."""

_SETS = ("completed", "failed", "delayed", "prioritized", "waiting-children")
_KEY_OF = {"waiting": "wait", "waiting-children": "waiting_children"}
_SCAN_MAX = 20_000
_CHUNK = 500
_SLOTS = 4096  # the score of a due time is ms * 4096 + its place within the millisecond
_EXACT_MAX = 2**53
_JSON_FIELDS = ("returnvalue", "data")
_NEWS_MAX = 1_000


def _record_of(
    job_id: str, queue: str, state: str, raw: dict[str, bytes], *, due_ms: int = 0
) -> JobRecord:
    """The record of a job whose state is known."""

    def text(name: str) -> str:
        return raw.get(name, b"").decode(errors="replace")

    def count(name: str) -> int:
        return number(raw.get(name))

    options = read_options(raw.get("opts", b"{}"))
    made, stalled = count("atm"), count("stc")
    created = count("timestamp")
    own = raw.get("tn", b"").split(b" ")  # see head.lua
    lease_until = number(own[2]) if len(own) == 6 else 0
    return JobRecord(
        job_id=job_id,
        contract=CONTRACT,
        queue=queue,
        task=text("name"),
        state=state,
        payload=raw.get("data", b"null"),
        result=raw.get("returnvalue", b""),
        error=_error(raw, cancelled=len(own) == 6 and own[4] == b"cancel"),
        attempt=made + stalled + (state == "active"),
        max_attempts=options.attempts + stalled if options.attempts else 0,
        fence=count("ats"),
        created_ms=created,
        updated_ms=count("finishedOn") or count("processedOn") or created,
        due_ms=due_ms,
        lease_until_ms=lease_until if state == "active" else 0,
        priority=count("priority"),
        worker_id=text("workerId") or text("pb"),
        progress=raw.get("progress", b""),
        trace=options.trace,
        extra=_extra(raw, made, stalled),
    )


def _error(raw: dict[str, bytes], *, cancelled: bool) -> bytes:
    """What BullMQ keeps of a failure, as JSON: the reason, and the stack of the last attempt.

    BullMQ has no state for cancelled jobs: the code marks those that our own scripts ended.
    """
    reason = raw.get("failedReason")
    if reason is None:
        return b""
    try:
        stacks = msgspec.json.decode(raw.get("stacktrace", b"[]"))
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
    """The name of the error: it begins a Node stack, and the last line of a Python one."""
    lines = [line for line in stack.strip().splitlines() if line]
    if not lines:
        return ""
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return line.partition(":")[0].strip()[:80]


def _extra(raw: dict[str, bytes], made: int, stalled: int) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "attemptsMade": made,  # B-2: BullMQ's own name for `atm`
        "stalledCounter": stalled,
        "cancel_requested": raw.get("cancel") == b"1",
    }
    for field in ("parentKey", "rjk", "deid", "defa"):
        if field in raw:
            extra[field] = raw[field].decode(errors="replace")
    return extra


async def read_children(redis: Redis, key: str) -> Children:
    """Read the four keys that a parent has for its children."""
    processed, failed, unsuccessful, pending = await read_all(
        redis,
        [
            ("HGETALL", f"{key}:processed"),
            ("HGETALL", f"{key}:failed"),
            ("ZRANGE", f"{key}:unsuccessful", 0, -1),
            ("SMEMBERS", f"{key}:dependencies"),
        ],
    )
    return Children(
        results={key: json_or_text(raw) for key, raw in _in_order(fields_of(processed))},
        failures={key: raw.decode(errors="replace") for key, raw in fields_of(failed).items()},
        fatal=[key.decode(errors="replace") for key in unsuccessful or ()],
        pending=sorted(key.decode(errors="replace") for key in pending or ()),
    )


def _in_order(results: dict[str, bytes]) -> list[tuple[str, bytes]]:
    """The results of children, those of a gather in the order of its jobs."""

    def place(item: tuple[str, bytes]) -> int:
        step = step_of(item[0].rpartition(":")[2])
        return step.number if step is not None else -1

    return sorted(results.items(), key=place)


def json_or_text(raw: bytes | None) -> Any:
    """A JSON value, or the text if it is not JSON; None for None."""
    try:
        return from_json(raw) if raw is not None else None
    except msgspec.DecodeError:
        return raw.decode(errors="replace") if raw is not None else None


def state_keys(key_prefix: str) -> dict[str, str]:
    """The key of each state."""
    named = keys(key_prefix)._asdict()
    return {state: named[_KEY_OF.get(state, state)] for state in STATES}


class Finder:
    """Reads the jobs of one queue."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._prefix = options.key_prefix
        self._queue = options.queue
        self._keys = state_keys(options.key_prefix)

    async def newest(self, states: Sequence[str], after: str) -> dict[str, str]:
        """The jobs in these states that come after a cursor, newest first, each with its state.

        BullMQ has no index by time. This reads the ids of the states, up to a bound, and the time
        of each job. Whole records are read for the few jobs that are shown.
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
        """The jobs of each state between two ranks, each with its state.

        Unless `ascending`, the newest job of a list comes first, and the job of a sorted set that
        is due, or that ended, last.
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
        for state, reply in zip(states, await read_all(self._redis, commands), strict=True):
            if reply is None:
                continue
            ids = reversed(reply) if ascending and state in LISTS else reply
            listed |= {job_id: state for each in ids if (job_id := text_of(each))}
        return listed

    async def records(
        self, ids: Sequence[str], listed: Mapping[str, str] | None = None
    ) -> list[JobRecord | None]:
        """The record of each job, from its hash and its position in the keys of the states.

        `listed` has states that were read a moment ago. With it no list is searched, because a
        search passes over the whole list.
        """
        searched = _SETS if listed is not None else (*_SETS, *LISTS)
        searches = [("LPOS" if s in LISTS else "ZSCORE", self._keys[s], s) for s in searched]
        found: list[JobRecord | None] = []
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            commands: list[tuple[Arg, ...]] = []
            for job_id in chunk:
                commands.append(("HGETALL", self._prefix + job_id))
                commands += [(command, key, job_id) for command, key, _ in searches]
            replies = iter(await self._redis.pipeline(commands))
            for job_id in chunk:
                flat = next(replies)
                positions = [(state, next(replies)) for _, _, state in searches]
                otherwise = "unknown" if listed is None else listed[job_id]
                found.append(self._record(job_id, flat, positions, otherwise))
        return found

    def _record(
        self, job_id: str, flat: Any, positions: list[tuple[str, Any]], otherwise: str
    ) -> JobRecord | None:
        if not isinstance(flat, list):
            return None  # the key is not a hash
        raw = fields_of(flat)
        if not raw.get("name"):
            return None
        if otherwise == "unknown" and raw.get("finishedOn"):
            otherwise = "failed" if "failedReason" in raw else "completed"
        found = ((state, at) for state, at in positions if isinstance(at, bytes | int))
        state, position = next(found, (otherwise, b"0"))
        due_ms = _due_ms(position) if state == "delayed" else 0
        return _record_of(job_id, self._queue, state, raw, due_ms=due_ms)


def _due_ms(score: bytes | int) -> int:
    value = float(score)
    return int(value) // _SLOTS if abs(value) <= _EXACT_MAX else 0


def _natural(job_id: str) -> tuple[int, str]:
    """A sort key that orders the ids that BullMQ counts as numbers."""
    return (int(job_id), "") if job_id.isdecimal() and len(job_id) < 20 else (-1, job_id)


def text_of(job_id: bytes) -> str:
    """An id as text; "" if it is not UTF-8, which no client of BullMQ writes."""
    try:
        return job_id.decode()
    except UnicodeDecodeError:
        return ""


class Event(msgspec.Struct, frozen=True):
    """One event: its `name` ("completed"), the id of its job if it has one, and its other fields.

    `returnvalue` and `data`, which are JSON in BullMQ, are decoded.
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
        """Events after a position ("" for the oldest); waits up to `wait_ms` for the first."""
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
        """Every event from now on, or after a position, without end."""
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
        """The result of a job, when it has completed; raises `JobFailed` or `TimeoutError`."""
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


class QueueNews:
    """The queue's event stream as the list of the jobs that changed.

    Node's workers write this stream and not our journal, so followers of jobs read this one.
    """

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._key = keys(options.key_prefix).events
        self._queue = options.queue

    async def last(self) -> str:
        """The position of the newest event."""
        entries = await self._redis.call("XREVRANGE", self._key, "+", "-", "COUNT", 1)
        return entries[0][0].decode() if entries else ""

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Events after a position, each with the state that it names; waits for the first."""
        reply = await self._redis.block(
            "XREAD", "COUNT", _NEWS_MAX, "BLOCK", wait_ms, "STREAMS", self._key, after or "0-0",
            wait_ms=wait_ms,
        )  # fmt: skip
        return [self._event(*entry) for entry in reply[0][1]] if reply else []

    def _event(self, seq: bytes, flat: list[bytes]) -> JournalEvent:
        fields = fields_of(flat)
        word = fields.get("event", b"").decode(errors="replace")
        return JournalEvent(
            seq=seq.decode(),
            contract=CONTRACT,
            queue=self._queue,
            job_id=fields.get("jobId", b"").decode(errors="replace"),
            type=word,
            to_state=word,
            ts_ms=int(seq.partition(b"-")[0]),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()


def read_events(entries: list[Any], job_id: str) -> list[JobEvent]:
    """The stream entries about one job, as events of the seam."""
    events = []
    encoded_id = job_id.encode()
    for seq, flat in entries:
        if encoded_id not in flat:  # most entries are about other jobs: skip them unparsed
            continue
        raw = fields_of(flat)
        if raw.get("jobId") == encoded_id:
            events.append(_job_event(seq, raw))
    return events


def events_by_job(entries: list[Any], cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
    """The stream entries about some jobs, each after its own position."""
    after = {job_id.encode(): (job_id, position(cursor)) for job_id, cursor in cursors.items()}
    found: dict[str, list[JobEvent]] = {}
    for seq, flat in entries:
        raw = fields_of(flat)
        wanted = after.get(raw.get("jobId", b""))
        if wanted is not None and position(seq.decode()) > wanted[1]:
            found.setdefault(wanted[0], []).append(_job_event(seq, raw))
    return found


def _job_event(seq: bytes, raw: dict[str, bytes]) -> JobEvent:
    return JobEvent(
        event_id=seq.decode(),
        type=raw.get("event", b"").decode(errors="replace"),
        ts_ms=number(raw.get("timestamp") or seq.split(b"-")[0]),
        step=raw.get("step", b"").decode(errors="replace"),
        data=_data(raw),
    )


def _data(raw: dict[str, bytes]) -> bytes:
    """The data of an event: the handler's own JSON, or its other fields as an object."""
    for field in ("info", "data"):
        if field in raw:
            return raw[field]
    if "returnvalue" in raw:
        return b'{"result":' + raw["returnvalue"] + b"}"
    rest = {
        name: value.decode(errors="replace")
        for name, value in raw.items()
        if name not in ("event", "jobId", "timestamp", "step")
    }
    return msgspec.json.encode(rest)


def _event(entry: list[Any]) -> Event:
    seq, flat = entry
    fields = {
        name: json_or_text(raw) if name in _JSON_FIELDS else raw.decode(errors="replace")
        for name, raw in fields_of(flat).items()
    }
    return Event(seq.decode(), fields.pop("event", ""), fields.pop("jobId", ""), fields)
