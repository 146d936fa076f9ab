"""Our scripts, and how each is called: with the queue's sixteen keys, and its prefix first."""

from __future__ import annotations

from typing import Any

from leasehold.contracts.bullmq.options import Options, keys
from leasehold.store.redis import Arg, Redis
from leasehold.store.scripts import ScriptFolder

SCRIPTS = ScriptFolder("leasehold.contracts.bullmq")
BATCH_MAX = 500
"""How many jobs one script handles at most, so that it stays short for everybody else."""


class Scripts:
    """The scripts on one queue."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._prefix = options.key_prefix
        self.keys = keys(options.key_prefix)

    async def run(self, name: str, *args: Arg) -> Any:
        """Run `lua/<name>-16.lua`."""
        return await self._redis.run(SCRIPTS[name], self.keys, (self._prefix, *args))
