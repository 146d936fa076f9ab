"""Jobs that stand nowhere because a line of the queue was overwritten are found by their hashes."""

from __future__ import annotations

from tenure.contracts.bullmq.scripts import BATCH_MAX, Scripts
from tenure.store.redis import Arg, Redis

_STEP = 1_000
_STEPS_MAX = 2_000  # two million keys of the server are looked at, not more


async def restore(redis: Redis, scripts: Scripts, prefix: str) -> int:
    """Put such jobs back; how many. Their order is lost with the line."""
    cursor: Arg = 0
    restored = 0
    for _ in range(_STEPS_MAX):
        match = literal(prefix) + "*"
        cursor, found = await redis.call(
            "SCAN", cursor, "MATCH", match, "COUNT", _STEP, "TYPE", "hash"
        )
        ids = [key[len(prefix.encode()) :] for key in found]
        for start in range(0, len(ids), BATCH_MAX):
            restored += await scripts.run("restore", *ids[start : start + BATCH_MAX])
        if cursor == b"0":
            break
    await redis.call("DEL", f"{prefix}tenure:restore")
    return restored


def literal(text: str) -> str:
    """What SCAN matches as it is."""
    return "".join(f"\\{c}" if c in "*?[]\\" else c for c in text)
