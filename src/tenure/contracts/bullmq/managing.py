"""A queue as a whole: its schedulers, its jobs by range, its figures, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tenure.contracts.bullmq import job_options
from tenure.contracts.bullmq.finding import STATES, Finder, text_of
from tenure.contracts.bullmq.options import CONTRACT
from tenure.contracts.bullmq.records import number
from tenure.contracts.bullmq.restoring import literal
from tenure.contracts.bullmq.scripts import BATCH_MAX, Scripts
from tenure.core.encoding import from_json
from tenure.core.errors import Conflict, ServerError, UsageError
from tenure.core.job import JobRecord
from tenure.store.redis import Arg, Redis
from tenure.store.resending import part


class SchedulerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler: the template of its jobs, when the next one is due, and how many it made.

    Of `every` (ms) and `pattern` it has one; times are ms, and 0 or "" means that it has none.
    """

    scheduler_id: str
    name: str
    next_ms: int
    iterations: int = 0
    every: int = 0
    offset: int = 0
    pattern: str = ""
    tz: str = ""
    limit: int = 0
    start_ms: int = 0
    end_ms: int = 0
    data: Any = None
    options: dict[str, Any] = {}


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Finished jobs of one kind: `points` counts them by the minute, the newest first.

    `count` is how many there were in all, `length` how many minutes are kept.
    """

    count: int
    points: list[int]
    length: int
    previous_ms: int = 0
    previous_count: int = 0


class Managing:
    """What is asked of a queue as a whole. Mixed into the ledger."""

    _redis: Redis
    _scripts: Scripts
    _finder: Finder
    _keys: list[str]

    async def jobs(
        self, *states: str, start: int = 0, end: int = -1, ascending: bool = False
    ) -> list[JobRecord]:
        """The jobs of each state from place `start` to `end` (-1: the last), the newest first or
        the next to run first; as BullMQ's `getJobs`."""
        unknown = set(states) - set(STATES)
        if unknown or not states:
            raise UsageError(f"name states: {', '.join(STATES)}", contract=CONTRACT)
        listed = await self._finder.between(states, start, end, ascending=ascending)
        found = await self._finder.records(list(listed), listed)
        return [record for record in found if record is not None]

    async def schedulers(self, *, start: int = 0, end: int = -1) -> list[SchedulerRecord]:
        """The schedulers, the next one due first."""
        repeat = self._prefix + "repeat"
        (flat,) = await self._redis.pipeline([("ZRANGE", repeat, start, end, "WITHSCORES")])
        if isinstance(flat, ServerError):  # of another type: upkeep puts it aside
            return []
        named = {text_of(each): due for each, due in zip(flat[::2], flat[1::2], strict=True)}
        named.pop("", None)
        hashes = await self._redis.pipeline([("HGETALL", f"{repeat}:{each}") for each in named])
        return [
            _scheduler(each, number(due), told)
            for (each, due), told in zip(named.items(), hashes, strict=True)
            if not isinstance(told, ServerError)
        ]

    async def metrics(self, kind: str = "completed", *, start: int = 0, end: int = -1) -> Metrics:
        """Finished jobs by the minute, where workers keep them (`metrics_minutes`)."""
        if kind not in ("completed", "failed"):
            raise UsageError(f"metrics are kept of completed and failed jobs, not of {kind!r}")
        key = f"{self._prefix}metrics:{kind}"
        fields, points, length = await self._redis.pipeline(
            [
                ("HMGET", key, "count", "prevTS", "prevCount"),
                ("LRANGE", f"{key}:data", start, end),
                ("LLEN", f"{key}:data"),
            ]
        )
        # A key of another type, which upkeep puts aside, counts as none.
        fields = (b"", b"", b"") if isinstance(fields, ServerError) else fields
        count, previous_ms, previous_count = (number(each or b"") for each in fields)
        has_points = not isinstance(points, ServerError)
        return Metrics(
            count=count,
            points=[number(each) for each in points] if has_points else [],
            length=length if has_points else 0,
            previous_ms=previous_ms,
            previous_count=previous_count,
        )

    async def trim_events(self, length: int) -> int:
        """Keep about so many of the newest events; how many went."""
        return int(await self._redis.call("XTRIM", self._keys[6], "MAXLEN", "~", length))

    async def remove_deduplication_key(self, deduplication_id: str) -> bool:
        """Let the next job with this id in, whoever holds it; False when nobody does."""
        return bool(await self._redis.call("DEL", f"{self._prefix}de:{deduplication_id}"))

    async def obliterate(self, *, force: bool = False) -> None:
        """Pause the queue and take it away with all its jobs; running ones only by `force`."""
        await self._scripts.run("pause", "pause")
        more = 1
        while more == 1:
            more = await self._scripts.run("obliterate", BATCH_MAX, int(force))
        if more < 0:
            what = "it was resumed meanwhile" if more == -1 else "jobs run in it; force ends them"
            raise Conflict(f"the queue cannot be obliterated: {what}", contract=CONTRACT)
        await self._forget("tenure:add:*", "tenure:idem:*", "tenure:quarantine*")

    async def _forget(self, *patterns: str) -> None:
        for pattern in patterns:
            cursor: Arg = 0
            while True:
                match = literal(self._prefix) + pattern
                scan = self._redis.call("SCAN", cursor, "MATCH", match, "COUNT", 1_000)
                cursor, found = await part(1, scan)
                if found:
                    await part(1, self._redis.call("UNLINK", *found))
                if cursor == b"0":
                    break

    @property
    def _prefix(self) -> str:
        return self._keys[0].removesuffix("wait")


def _scheduler(scheduler_id: str, next_ms: int, flat: Sequence[bytes]) -> SchedulerRecord:
    told = dict(zip(flat[::2], flat[1::2], strict=True))

    def text(name: bytes) -> str:
        return told.get(name, b"").decode(errors="replace")

    def count(name: bytes) -> int:
        return number(told.get(name, b""))

    return SchedulerRecord(
        scheduler_id=scheduler_id,
        name=text(b"name"),
        next_ms=next_ms,
        iterations=count(b"ic"),
        every=count(b"every"),
        offset=count(b"offset"),
        pattern=text(b"pattern"),
        tz=text(b"tz"),
        limit=count(b"limit"),
        start_ms=count(b"startDate"),
        end_ms=count(b"endDate"),
        data=_json(told.get(b"data")),
        options=job_options.unpack(told.get(b"opts", b"{}")),
    )


def _json(raw: bytes | None) -> Any:
    try:
        return None if raw is None else from_json(raw)
    except msgspec.DecodeError:
        return None
