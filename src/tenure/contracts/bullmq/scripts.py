"""Our scripts, and how each is called: with the queue's sixteen keys, and its prefix first.

A script that meets a key of the queue with another type raises before it writes anything; the key
is then put aside by `mend-16.lua`, and the script runs again.
"""

from __future__ import annotations

from typing import Any

from tenure.contracts.bullmq.options import Options, keys
from tenure.core.errors import ServerError
from tenure.core.seam import Quarantined
from tenure.store.redis import Arg, Redis
from tenure.store.scripts import ScriptFolder

SCRIPTS = ScriptFolder("tenure.contracts.bullmq")
BATCH_MAX = 500
"""How many jobs one script handles at most, so that it stays short for everybody else."""


# What Redis says of a key that holds something else than the script expects.
_MENDABLE = ("WRONGTYPE", "not an integer", "would overflow")
_NOTED_MAX = 1_000


class Scripts:
    """The scripts on one queue."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._prefix = options.key_prefix
        self.keys = keys(options.key_prefix)
        self.quarantined: list[Quarantined] = []

    async def run(self, name: str, *args: Arg) -> Any:
        """Run `lua/<name>-16.lua`."""
        try:
            return await self._redis.run(SCRIPTS[name], self.keys, (self._prefix, *args))
        except ServerError as error:
            await self.mend(error)
        return await self._redis.run(SCRIPTS[name], self.keys, (self._prefix, *args))

    async def mend(self, error: ServerError) -> None:
        """Put aside what made the store answer so; raises the error again if that is not it."""
        if not any(words in str(error) for words in _MENDABLE):
            raise error
        self.note(await self._redis.run(SCRIPTS["mend"], self.keys, (self._prefix,)))

    def note(self, rows: Any) -> None:
        """Remember what a script set aside, for the worker's log and metrics."""
        for job_id, reason in rows:
            told = Quarantined(job_id.decode(errors="replace"), reason.decode(errors="replace"))
            self.quarantined.append(told)
        del self.quarantined[:-_NOTED_MAX]
