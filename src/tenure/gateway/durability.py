"""What a store is set to that would lose or refuse jobs; asked once a minute, for the overview."""

from __future__ import annotations

import time

from tenure.core.errors import StoreError
from tenure.dashboard.gathering import Warn
from tenure.store.redis import Redis

_BELIEVE_S = 60.0


class Durability:
    """The settings of one Redis; without one there is nothing to warn of."""

    def __init__(self, redis: Redis | None) -> None:
        self._redis = redis
        self._asked_s = float("-inf")
        self._found: list[Warn] = []

    async def warnings(self) -> list[Warn]:
        """What `tenure doctor` would say of it first."""
        if self._redis is not None and time.monotonic() - self._asked_s > _BELIEVE_S:
            self._asked_s = time.monotonic()
            self._found = await _ask(self._redis)
        return self._found


async def _ask(redis: Redis) -> list[Warn]:
    try:
        persistence, memory = await redis.pipeline([("INFO", "persistence"), ("INFO", "memory")])
    except StoreError:
        return []
    found = []
    if b"aof_enabled:0" in persistence:
        text = "appendonly is off: a crash of the store loses the jobs of the last minutes"
        found.append(Warn("Redis", text, "redis-cli CONFIG SET appendonly yes"))
    if b"maxmemory_policy:" in memory and b"maxmemory_policy:noeviction" not in memory:
        text = "maxmemory-policy lets the store throw jobs away when it is full"
        found.append(Warn("Redis", text, "redis-cli CONFIG SET maxmemory-policy noeviction"))
    return found
