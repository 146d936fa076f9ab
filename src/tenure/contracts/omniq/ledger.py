"""Reading and steering the jobs of this contract, for gateway, dashboard and command line."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tenure.contracts.omniq.calls import Calls
from tenure.contracts.omniq.options import CONTRACT, Options, queue_base
from tenure.contracts.omniq.records import (
    STATES,
    entries_of,
    events_of,
    fields_of,
    number,
    position,
    readable,
    record_of,
)
from tenure.core.errors import UsageError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.seam import (
    PAGE_BYTES,
    READ_STEP,
    Counts,
    Page,
    Query,
    WorkerBeat,
    first_page,
    is_full,
    weight,
)
from tenure.store.redis import Arg, Redis

_CURSOR = re.compile(r"[0-9]{1,18}:.+", re.DOTALL)
_STEP = 200
# One call of `find` looks at no more jobs than this; a rarer task is found page by page.
_SCAN_MAX = 5_000
_WORKER_ALIVE_MS = 15_000
# One script passes once over a long list, whatever it removes: a few at a time keep it short.
_STEER_MAX = 25
_WORDS = {"OK": "ok", "REQUESTED": "requested", "NO_JOB": "missing", "ACTIVE": "active"}


class OmniqLedger:
    """The ledger of one queue, for one event loop."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._options = options
        self._calls = Calls(redis, options.queue)
        self._base = queue_base(options.queue)
        self._task = options.task or options.queue

    async def get(self, job_id: str) -> JobRecord | None:
        """The job's hash, or None when there is none (any more)."""
        (flat,) = await self._ask([("HGETALL", f"{self._base}:job:{job_id}")])
        return self._record(job_id, flat) if flat else None

    async def find(self, query: Query) -> Page:
        """Jobs by when they last changed state, newest first; `after` is `ms:job_id`."""
        states = query.states or STATES
        self._check(query, states)
        found: list[JobRecord] = []
        after, scanned, read = query.after, 0, 0
        while scanned < _SCAN_MAX:
            step = await self._step(states, after)
            async for entered, job_id, flat in self._hashes(step):
                after = f"{entered}:{job_id}"
                scanned += 1
                record = self._record(job_id, flat) if flat else None
                read += weight(record) if record else 0
                if record and self._matches(record, query):
                    found.append(record)
                if len(found) >= query.limit or read >= PAGE_BYTES:
                    return Page(found, after)
            if len(step) < _STEP:
                return Page(found)
        return Page(found, after)

    async def counts(self) -> Counts:
        """How many jobs are where now; totals are of what our own clients did."""
        key = self._base
        replies = await self._ask(
            [
                ("LLEN", f"{key}:wait"),
                ("HGET", f"{key}:stats", "group_waiting"),
                ("ZCARD", f"{key}:delayed"),
                ("ZCARD", f"{key}:active"),
                ("LLEN", f"{key}:completed"),
                ("LLEN", f"{key}:failed"),
                ("EXISTS", f"{key}:paused"),
                ("HGETALL", f"{key}:counters"),
                ("HVALS", f"{key}:workers"),
                ("ZRANGE", f"{key}:idx:wait", 0, 0, "WITHSCORES"),
                ("TIME",),
            ]
        )
        wait, grouped, delayed, active, completed, failed, paused, totals, beats, first, clock = (
            replies
        )
        now = int(clock[0]) * 1000 + int(clock[1]) // 1000
        return Counts(
            states={
                "wait": (wait or 0) + number(grouped),
                "delayed": delayed or 0,
                "active": active or 0,
                "completed": completed or 0,
                "failed": failed or 0,
            },
            totals={name: number(value) for name, value in fields_of(totals).items()},
            paused=bool(paused),
            workers=sum(
                now - number(beat.split(b" ")[0]) < _WORKER_ALIVE_MS for beat in beats or ()
            ),
            oldest_waiting_ms=max(0, now - number(first[1])) if first else 0,
        )

    async def workers(self) -> list[WorkerBeat]:
        """Workers of ours that claimed lately, also in vain; others leave no trace."""
        flat, clock = await self._ask([("HGETALL", f"{self._base}:workers"), ("TIME",)])
        oldest = int(clock[0]) * 1000 - _WORKER_ALIVE_MS
        beats = [
            WorkerBeat(name, *map(number, words.split(b" ")[:2]))
            for name, words in fields_of(flat).items()
        ]
        return [beat for beat in beats if beat.last_ms > oldest]

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """What happened to one job, after an event id."""
        key = f"{self._base}:events:{job_id}"
        start = f"({after}" if after else "-"
        flat, last, step = await self._ask(
            [
                ("HGETALL", f"{self._base}:job:{job_id}"),
                ("XREVRANGE", key, "+", "-", "COUNT", 1),
                ("XRANGE", key, start, "+", "COUNT", READ_STEP),
            ]
        )
        if not flat:
            return []
        created, *ended = events_of(fields_of(flat), last)
        seen = position(after)
        events = [created] if position(created.event_id) > seen else []
        events += entries_of(step)
        while len(step or ()) == READ_STEP and not is_full(events, limit):
            start = f"({step[-1][0].decode()}"
            (step,) = await self._ask([("XRANGE", key, start, "+", "COUNT", READ_STEP)])
            events += entries_of(step)
        if len(step or ()) < READ_STEP:
            events += [event for event in ended if position(event.event_id) > seen]
        return first_page(events, limit)

    async def pause(self) -> None:
        """Hand out no more leases."""
        await self._calls.run("pause")

    async def resume(self) -> None:
        """Hand out leases again."""
        await self._calls.run("resume")

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Send failed jobs back; per id "ok", "missing" or "not_failed"."""
        return await self._steer("retry", job_ids)

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok" (was waiting), "requested" (its worker is told), "missing", "finished"."""
        return await self._steer("cancel", job_ids)

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok", "missing" or "active"."""
        return await self._steer("remove", job_ids)

    async def probe(self) -> None:
        """Raise `StoreError` where the server takes no writes."""
        await self._redis.call("SET", f"{self._base}:probe", "", "PX", 1)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    async def _steer(self, verb: str, job_ids: Sequence[str]) -> list[str]:
        words = await steer(self._calls, verb, job_ids, keep_failed=self._options.keep_failed)
        return [_WORDS.get(word, word.lower()) for word in words]

    def _record(self, job_id: str, flat: Any) -> JobRecord:
        return record_of(job_id, fields_of(flat), self._options.queue, self._task)

    def _check(self, query: Query, states: Sequence[str]) -> None:
        unknown = set(states) - set(STATES)
        if unknown:
            raise UsageError(
                f"no such state: {', '.join(sorted(unknown))}; there are {', '.join(STATES)}",
                contract=CONTRACT,
            )
        if query.after and not _CURSOR.fullmatch(query.after):
            raise UsageError(
                f"{query.after!r} is not a cursor; pass the `after` of the page before",
                contract=CONTRACT,
            )

    def _matches(self, record: JobRecord, query: Query) -> bool:
        return (not query.states or record.state in query.states) and (
            not query.task or record.task == query.task
        )

    async def _step(self, states: Sequence[str], after: str) -> list[tuple[int, str]]:
        """The next jobs of all the states together, by (time, id)."""
        seen: set[str] = set()
        merged: list[tuple[int, str]] = []
        for state in states:
            merged += await self._next_of(state, after)
        step = []
        for entered, job_id in sorted(merged, reverse=True):
            if job_id not in seen:
                seen.add(job_id)
                step.append((entered, job_id))
        return step[:_STEP]

    async def _hashes(self, step: list[tuple[int, str]]) -> AsyncIterator[tuple[int, str, Any]]:
        for start in range(0, len(step), READ_STEP):
            part = step[start : start + READ_STEP]
            flats = await self._ask([("HGETALL", f"{self._base}:job:{j}") for _, j in part])
            for (ms, job_id), flat in zip(part, flats, strict=True):
                yield ms, job_id, flat

    async def _next_of(self, state: str, after: str) -> list[tuple[int, str]]:
        index = f"{self._base}:idx:{state}"
        if not after:
            return await self._ranks(index, 0)
        entered, _, last_id = after.partition(":")
        cursor = (int(entered), last_id)
        (start,) = await self._ask([("ZCOUNT", index, f"({entered}", "+inf")])
        start = start or 0
        while ranks := await self._ranks(index, start):
            left = [each for each in ranks if each < cursor]
            if left:
                # A step that begins inside a millisecond is filled up from where it ends.
                more = await self._ranks(index, start + len(ranks)) if len(left) < _STEP else []
                return [*left, *more]
            start += len(ranks)
        return []

    async def _ranks(self, index: str, start: int) -> list[tuple[int, str]]:
        (flat,) = await self._ask([("ZREVRANGE", index, start, start + _STEP - 1, "WITHSCORES")])
        flat = flat or []
        return [
            (number(score), member.decode(errors="replace"))
            for member, score in zip(flat[::2], flat[1::2], strict=True)
        ]

    async def _ask(self, commands: list[tuple[Arg, ...]]) -> list[Any]:
        return readable(await self._redis.pipeline(commands))


async def steer(
    calls: Calls,
    verb: str,
    job_ids: Sequence[str],
    *,
    lane: str = "",
    now_ms: int = 0,
    keep_failed: int = 0,
) -> list[str]:
    """Cancel, retry or remove; OmniQ's word per id. What would block the server is asked again."""
    words: dict[int, str] = {}
    pending = list(range(len(job_ids)))
    while pending:
        chunk = pending[:_STEER_MAX]
        ids = [job_ids[at] for at in chunk]
        replies = await calls.run("steer", now_ms, verb, lane, keep_failed, *ids)
        again = []
        for at, reply in zip(chunk, replies, strict=True):
            if reply == b"AGAIN":
                again.append(at)
            else:
                words[at] = reply.decode()
        pending = again + pending[_STEER_MAX:]
    return [words[at] for at in range(len(job_ids))]
