"""Calls the Lua scripts with the queue's sixteen keys, and repairs keys of another type."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import chain
from typing import Any

from tenure.contracts.bullmq.options import Options, keys
from tenure.core.errors import ReplyLost, ServerError, StoreUnreachable
from tenure.store.redis import Arg, Redis, ScriptFolder
from tenure.store.redis_queue import BATCH_MAX, Quarantine, in_batches

SCRIPTS = ScriptFolder("tenure.contracts.bullmq")
# What Redis says of a key that holds something else than the script expects.
_MENDABLE = ("WRONGTYPE", "not an integer", "would overflow")
_RESTORE_PAGES_MAX = 2_000  # at most two million keys of the server are looked at


class Scripts:
    """The scripts of one queue. `quarantine` has the records that they set aside."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self.keys = keys(options.key_prefix)
        self.quarantine = Quarantine()
        self._redis = redis
        self._prefix = options.key_prefix

    async def run(self, name: str, *args: Arg, replicated: bool = False) -> Any:
        """Run `lua/<name>-16.lua`; `replicated` as in `Redis.run`.

        A script that meets a key of another type raises before it writes. Then `mend-16.lua`
        renames the key, and the script runs again.
        """
        script, given = SCRIPTS[name], (self._prefix, *args)
        try:
            return await self._redis.run(script, self.keys, given, replicated=replicated)
        except ServerError as error:
            await self.mend(error)
        return await self._redis.run(script, self.keys, given, replicated=replicated)

    async def run_rows(
        self,
        name: str,
        head: Sequence[Arg],
        rows: Sequence[Sequence[Arg]],
        *,
        replicated: bool = False,
    ) -> list[Any]:
        """Run a script that takes rows of arguments, in batches; a reply for each row."""

        async def send(batch: Sequence[Sequence[Arg]]) -> Any:
            args = chain.from_iterable(batch)
            return await self.run(name, *head, *args, replicated=replicated)

        return await in_batches(rows, send)

    async def mend(self, error: ServerError) -> None:
        """Repair the keys that caused the error; raise it again if it has another cause."""
        if not any(words in str(error) for words in _MENDABLE):
            raise error
        self.note(await self._redis.run(SCRIPTS["mend"], self.keys, (self._prefix,)))

    def note(self, rows: Any) -> None:
        """Remember what a script set aside, for the worker's log and metrics."""
        for job_id, reason in rows:
            self.quarantine.add(job_id, reason)

    async def restore(self) -> None:
        """Put back jobs that are in no list because a key of the queue was overwritten.

        They are found by their hashes; their order is lost.
        """
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
        try:
            async for found in self._redis.scan(prefix + pattern, *more):
                yield found
        except StoreUnreachable as error:
            raise ReplyLost(f"{error}; an earlier part of the call was executed") from error
