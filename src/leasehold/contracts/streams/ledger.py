"""Reading and steering the jobs of this contract, for gateway, dashboard and command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from leasehold.contracts.streams.options import CONTRACT, GROUP, QUEUE, Options, keys
from leasehold.contracts.streams.queue import SCRIPTS
from leasehold.core.errors import ServerError, UsageError
from leasehold.core.job import JobEvent, JobRecord
from leasehold.core.seam import Counts, Page, Query, WorkerBeat
from leasehold.store.redis import Arg, Redis

_STATES = ("queued", "running", "done", "error", "canceled")
_CURSOR = re.compile(r"\d+:.+", re.DOTALL)
_PAGE_STEP = 200
# One call of `find` looks at no more jobs than this; a rarer state is found page by page.
_SCAN_MAX = 5_000
_WORKER_ALIVE_MS = 15_000


class StreamsLedger:
    """The ledger of one queue, for one event loop."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._options = options
        self._keys = keys(options.namespace)

    async def get(self, job_id: str) -> JobRecord | None:
        """The job's hash, or None when there is none (any more)."""
        flat = await self._redis.call("HGETALL", self._job_key(job_id))
        return _record(job_id, flat) if flat else None

    async def find(self, query: Query) -> Page:
        """Jobs by creation time, newest first. `after` is `created_ms:job_id` of the last seen."""
        unknown = set(query.states) - set(_STATES)
        if unknown:
            raise UsageError(
                f"no such state: {', '.join(sorted(unknown))}; there are {', '.join(_STATES)}",
                contract=CONTRACT,
            )
        if query.after and not _CURSOR.fullmatch(query.after):
            raise UsageError(
                f"{query.after!r} is not a cursor; pass the `after` of the page before",
                contract=CONTRACT,
            )
        found: list[JobRecord] = []
        after, scanned = query.after, 0
        while scanned < _SCAN_MAX:
            step = await self._index_step(after)
            if not step:
                return Page(found)
            for job_id, created, flat in await self._hashes(step):
                after = f"{created}:{job_id}"
                scanned += 1
                record = _record(job_id, flat) if flat else None
                if record and _matches(record, query):
                    found.append(record)
                    if len(found) >= query.limit:
                        return Page(found, after)
        return Page(found, after)

    async def counts(self) -> Counts:
        """Depth by state now, and totals since the queue exists."""
        stream, _, delayed, _, _, stats, _, paused, workers = self._keys
        replies = await self._redis.pipeline(
            [
                ("XLEN", stream),
                ("XPENDING", stream, GROUP),
                ("ZCARD", delayed),
                ("HGETALL", stats),
                ("EXISTS", paused),
                ("XINFO", "GROUPS", stream),
                ("TIME",),
                ("HVALS", workers),
            ]
        )
        length, pending, waiting_for_time, totals, is_paused, groups, clock, beats = replies
        running = 0 if isinstance(pending, ServerError) else int(pending[0])
        names = _pairs(totals)
        now = int(clock[0]) * 1000 + int(clock[1]) // 1000
        undelivered, oldest = await self._undelivered(groups, length, running, now)
        return Counts(
            states={
                "queued": undelivered + waiting_for_time,
                "running": running,
                **{state: int(names.get(state, 0)) for state in _STATES[2:]},
            },
            totals={name: int(value) for name, value in names.items()},
            paused=bool(is_paused),
            workers=sum(now - _int(beat.split(b" ")[0]) < _WORKER_ALIVE_MS for beat in beats),
            oldest_waiting_ms=oldest,
        )

    async def workers(self) -> list[WorkerBeat]:
        """Workers that claimed lately, also in vain."""
        clock, flat = await self._redis.pipeline([("TIME",), ("HGETALL", self._keys[8])])
        oldest = int(clock[0]) * 1000 - _WORKER_ALIVE_MS
        beats = [_beat(worker_id, *words.split(b" ")) for worker_id, words in _pairs(flat).items()]
        return [beat for beat in beats if beat.last_ms > oldest]

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """The job's own event stream after a stream id."""
        start = f"({after}" if after else "-"
        key = f"{self._job_key(job_id)}:events"
        return _events(await self._redis.call("XRANGE", key, start, "+", "COUNT", limit))

    async def changes(self, cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
        """What is new in the event streams of many jobs, each after its cursor; never blocks."""
        if not cursors:
            return {}
        names: list[Arg] = [f"{self._job_key(job_id)}:events" for job_id in cursors]
        after: list[Arg] = [cursor or "0-0" for cursor in cursors.values()]
        reply = await self._redis.call("XREAD", "COUNT", 1000, "STREAMS", *names, *after)
        skip = len(self._options.namespace) + len("job:")
        return {
            key.decode()[skip : -len(":events")]: _events(entries) for key, entries in reply or ()
        }

    async def pause(self) -> None:
        """Hand out no more leases."""
        await self._run("pause", "pause")

    async def resume(self) -> None:
        """Hand out leases again."""
        await self._run("pause", "resume")

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Send finished jobs back; per id "ok", "missing" or the state that forbids it."""
        return await self._steer("retry", job_ids)

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok" (was waiting), "requested" (its worker is told), "missing", or its end."""
        return await self._steer("cancel", job_ids)

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok", "missing", or "running"."""
        return await self._steer("remove", job_ids)

    async def probe(self) -> None:
        """Raise `StoreError` where the server takes no writes."""
        await self._redis.call("SET", f"{self._options.namespace}jobs:probe", "", "PX", 1)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    def _job_key(self, job_id: str) -> str:
        return f"{self._options.namespace}job:{job_id}"

    async def _run(self, name: str, *args: Arg) -> Any:
        return await self._redis.run(SCRIPTS[name], self._keys, (self._options.namespace, *args))

    async def _steer(self, verb: str, job_ids: Sequence[str]) -> list[str]:
        answers: list[str] = []
        for start in range(0, len(job_ids), 500):  # one script stays short for the other clients
            replies = await self._run("steer", verb, *job_ids[start : start + 500])
            answers += [reply.decode() for reply in replies]
        return answers

    async def _index_step(self, after: str) -> list[tuple[str, int]]:
        """The next jobs of the index after a cursor; found by rank, as many share a millisecond."""
        index = self._keys[6]
        if not after:
            return await self._ranks(0)
        created, _, last_id = after.partition(":")
        rank = await self._redis.call("ZREVRANK", index, last_id)
        if rank is not None:
            return await self._ranks(rank + 1)
        # The cursor's own job is gone: start where its millisecond starts and skip by comparing.
        start = await self._redis.call("ZCOUNT", index, f"({created}", "+inf")
        while step := await self._ranks(start):
            start += len(step)
            left = [(job, ms) for job, ms in step if (ms, job) < (int(created), last_id)]
            if left:
                return left
        return []

    async def _ranks(self, start: int) -> list[tuple[str, int]]:
        flat = await self._redis.call(
            "ZREVRANGE", self._keys[6], start, start + _PAGE_STEP - 1, "WITHSCORES"
        )
        return [
            (member.decode(), int(float(score)))
            for member, score in zip(flat[::2], flat[1::2], strict=True)
        ]

    async def _hashes(self, step: list[tuple[str, int]]) -> list[tuple[str, int, Any]]:
        flats = await self._redis.pipeline([("HGETALL", self._job_key(job)) for job, _ in step])
        return [(job, ms, flat) for (job, ms), flat in zip(step, flats, strict=True)]

    async def _undelivered(
        self, groups: Any, length: int, running: int, now: int
    ) -> tuple[int, int]:
        """How many entries nobody was given yet, and how long the oldest of them has waited."""
        position = "-"
        lag: int | None = length
        for flat in () if isinstance(groups, ServerError) else groups:
            group = _pairs(flat)
            if group.get("name") == GROUP.encode():
                position = f"({group['last-delivered-id'].decode()}"
                lag = group.get("lag", max(0, length - running))
        first = await self._redis.call("XRANGE", self._keys[0], position, "+", "COUNT", 1)
        oldest = now - int(first[0][0].split(b"-")[0]) if first else 0
        return (lag if lag is not None else max(0, length - running)), max(0, oldest)


def _pairs(flat: Any) -> dict[str, Any]:
    return {key.decode(): value for key, value in zip(flat[::2], flat[1::2], strict=True)}


def _events(entries: Any) -> list[JobEvent]:
    events = []
    for seq, fields in entries:
        raw = dict(zip(fields[::2], fields[1::2], strict=True))
        events.append(
            JobEvent(
                event_id=seq.decode(),
                type=raw.get(b"type", b"").decode(errors="replace"),
                ts_ms=_int(raw.get(b"ts", b"")),
                step=raw.get(b"step", b"").decode(errors="replace"),
                data=raw.get(b"data", b"{}"),
            )
        )
    return events


def _record(job_id: str, flat: Any) -> JobRecord:
    raw: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))

    def text(name: bytes) -> str:
        return raw.get(name, b"").decode(errors="replace")

    def number(name: bytes) -> int:
        return _int(raw.get(name, b""))

    fence, _, attempt, max_attempts, lost, lease_until, worker = _lease_words(text(b"lease"))
    trace = text(b"entry").rpartition(" ")[2]
    return JobRecord(
        job_id=job_id,
        contract=CONTRACT,
        queue=QUEUE,
        task=text(b"task"),
        state=text(b"status"),
        payload=raw.get(b"payload", b"null"),
        result=raw.get(b"result", b""),
        error=raw.get(b"error", b""),
        attempt=int(attempt),
        max_attempts=int(max_attempts),
        fence=int(fence),
        created_ms=number(b"created_ts"),
        updated_ms=number(b"updated_ts"),
        due_ms=number(b"due_ms"),
        lease_until_ms=int(lease_until),
        ttl_ms=number(b"ttl_s") * 1000,
        worker_id="" if worker in ("-", "+") else worker,
        requester=text(b"requester"),
        progress=raw.get(b"progress", b""),
        trace="" if trace == "-" else trace,
        extra={
            "ttl_s": number(b"ttl_s"),
            "cancel_requested": raw.get(b"cancel") == b"1",
            "leases_lost": int(lost),
        },
    )


def _lease_words(packed: str) -> list[str]:
    """Our own state of a job (see lua/include/job.lua); zeros where a foreign gateway wrote."""
    words = packed.split(" ")
    return words if len(words) == 7 else ["0", "0", "0", "0", "0", "0", "-"]


def _int(raw: bytes) -> int:
    """A number that another program may have written carelessly."""
    try:
        return int(float(raw)) if raw else 0
    except (ValueError, OverflowError):
        return 0


def _matches(record: JobRecord, query: Query) -> bool:
    return (not query.states or record.state in query.states) and (
        not query.task or record.task == query.task
    )


def _beat(worker_id: str, at: bytes, *rest: bytes) -> WorkerBeat:
    """The words of a worker: when, its claim (instance, number), the job it has alone, slots."""
    return WorkerBeat(worker_id, _int(at), _int(rest[3]) if len(rest) > 3 else 0)
