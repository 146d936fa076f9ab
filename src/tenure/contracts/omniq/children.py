"""Counting children: a parent knows when the last of them is done."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

from tenure.contracts.omniq.calls import SCRIPTS, insist
from tenure.contracts.omniq.errors import OptionValue, Refused
from tenure.core.errors import StoreError
from tenure.store.redis import Arg, Redis

_KEY_CHARS_MAX = 128


class Children:
    """The counters of one server; a counter belongs to no queue."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def begin(self, key: str, expected: int) -> None:
        """Expect so many children; raises `Refused` when a count is under way."""
        word = await self._run("childs_init", key, expected)
        if word[0] != b"OK":
            raise Refused("CHILDS_INIT", f"counter {key!r}", word[1].decode())

    async def ack(self, key: str, child_id: str) -> int:
        """How many are left; -1 when there is no counter."""
        word = await self._run("child_ack", key, child_id, secrets.token_hex(8))
        if word[0] != b"OK":
            return -1
        if word[1] == 0:  # heard, so nothing needs to be remembered for a resend
            with contextlib.suppress(StoreError):
                await self._redis.call("DEL", f"{{cc:{_checked(key)}}}:last")
        return int(word[1])

    async def _run(self, name: str, key: str, *args: Arg) -> Any:
        anchor = f"{{cc:{_checked(key)}}}:meta"
        return await insist(lambda: self._redis.run(SCRIPTS[name], [anchor], args))


def _checked(key: str) -> str:
    name = key.strip()
    if not name or len(name) > _KEY_CHARS_MAX or "{" in name or "}" in name:
        raise OptionValue(f"counter {key!r:.60}: 1 to {_KEY_CHARS_MAX} characters, no braces")
    return name
