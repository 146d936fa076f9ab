"""Records beside a queue in Redis: a hash for each group, under the prefix of the queue's keys."""

from __future__ import annotations

from tenure.store.redis import Redis, ScriptFolder
from tenure.store.redis_queue import clock_ms, fields_of

SCRIPTS = ScriptFolder("tenure.store")


class RedisRecords:
    """The records of one queue; `prefix` is that of its own keys."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._prefix = prefix

    async def read(self, group: str) -> tuple[int, dict[str, str]]:
        """The server's time, and the records of a group by name."""
        clock, flat = await self._redis.pipeline([("TIME",), ("HGETALL", self._prefix + group)])
        if isinstance(flat, Exception):
            raise flat
        found = {name: raw.decode(errors="replace") for name, raw in fields_of(flat).items()}
        return clock_ms(clock), found

    async def get(self, group: str, name: str) -> str:
        """One record, "" if there is none."""
        raw = await self._redis.call("HGET", self._prefix + group, name)
        return raw.decode(errors="replace") if raw else ""

    async def swap(
        self, group: str, name: str, before: str, after: str, *, keep_ms: int = 0
    ) -> bool:
        """Replace a record that is `before` by `after`; True if it is `after` now."""
        args = (name, before, after, keep_ms)
        return bool(await self._redis.run(SCRIPTS["swap"], [self._prefix + group], args))

    async def size(self, group: str) -> int:
        """How many records a group has."""
        return int(await self._redis.call("HLEN", self._prefix + group))

    async def expire(self, group: str, keep_ms: int) -> None:
        """Keep a group for so long only."""
        await self._redis.call("PEXPIRE", self._prefix + group, keep_ms)
