"""The Lua scripts, called with the queue's sixteen keys; keys of another type are put aside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import chain
from typing import Any

from tenure.contracts.bullmq.options import Options, keys
from tenure.core.errors import ServerError
from tenure.core.seam import Quarantined
from tenure.store.redis import Arg, Redis
from tenure.store.resend import part
from tenure.store.scripts import ScriptFolder

SCRIPTS = ScriptFolder("tenure.contracts.bullmq")
BATCH_MAX = 500
"""How many jobs one script handles at most, so that it stays short for everybody else."""
# What Redis says of a key that holds something else than the script expects.
_MENDABLE = ("WRONGTYPE", "not an integer", "would overflow")
_NOTED_MAX = 1_000
_RESTORE_PAGES_MAX = 2_000  # at most two million keys of the server are looked at


class Scripts:
    """The scripts on one queue."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._prefix = options.key_prefix
        self.keys = keys(options.key_prefix)
        self.quarantined: list[Quarantined] = []

    async def run(self, name: str, *args: Arg) -> Any:
        """Run `lua/<name>-16.lua`. A script that meets a key of another type raises before it
        depends on it; the key is then put aside by `mend-16.lua`, and the script runs again."""
        try:
            return await self._redis.run(SCRIPTS[name], self.keys, (self._prefix, *args))
        except ServerError as error:
            await self.mend(error)
        return await self._redis.run(SCRIPTS[name], self.keys, (self._prefix, *args))

    async def run_rows(
        self, name: str, head: Sequence[Arg], rows: Sequence[Sequence[Arg]]
    ) -> list[Any]:
        """Run a script that takes rows of arguments, in batches; a reply for each row."""
        replies: list[Any] = []
        for start in range(0, len(rows), BATCH_MAX):
            args = chain.from_iterable(rows[start : start + BATCH_MAX])
            replies += await part(start, self.run(name, *head, *args))
        return replies

    async def mend(self, error: ServerError) -> None:
        """Put aside what made the store answer so; raises the error again if that is not it."""
        if not any(words in str(error) for words in _MENDABLE):
            raise error
        self.note(await self._redis.run(SCRIPTS["mend"], self.keys, (self._prefix,)))

    def note(self, rows: Any) -> None:
        """Remember what a script set aside, for the worker's log and metrics."""
        self.quarantined += [
            Quarantined(job_id.decode(errors="replace"), reason.decode(errors="replace"))
            for job_id, reason in rows
        ]
        del self.quarantined[:-_NOTED_MAX]

    async def restore(self) -> None:
        """Put jobs back that are in no list because a key of the queue was overwritten. They are
        found by their hashes; their order is lost."""
        start, pages = len(self._prefix.encode()), 0
        async for found in self.scan("*", "TYPE", "hash"):
            ids = [key[start:] for key in found]
            for at in range(0, len(ids), BATCH_MAX):
                await self.run("restore", *ids[at : at + BATCH_MAX])
            pages += 1
            if pages >= _RESTORE_PAGES_MAX:
                break
        await self._redis.call("DEL", f"{self._prefix}tenure:restore")

    async def scan(self, pattern: str, *more: Arg) -> AsyncIterator[list[bytes]]:
        """The keys of the queue that match, a page at a time."""
        prefix = "".join(f"\\{c}" if c in "*?[]\\" else c for c in self._prefix)
        cursor: Arg = 0
        while cursor != b"0":
            scan = ("SCAN", cursor, "MATCH", prefix + pattern, "COUNT", 1_000, *more)
            cursor, found = await part(1, self._redis.call(*scan))
            yield found
