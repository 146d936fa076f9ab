"""Puts the tables of a queue right after clients that do not keep them, piece by piece.

OmniQ 1.x moves jobs and leaves `stats` and `idx` as they were; a hash deleted by hand leaves its
group's slot taken. Upkeep notices either and calls this; the server is never kept for long.
"""

from __future__ import annotations

from typing import Any

from leasehold.contracts.omniq.calls import Calls
from leasehold.contracts.omniq.options import queue_base
from leasehold.store.redis import Arg

_STEP = 500
_STATES = ("wait", "active", "delayed", "failed", "completed")


async def repair(calls: Calls, queue: str) -> int:
    """Compare mirror tables, counters and groups with the lanes; how many entries were wrong."""
    base = queue_base(queue)
    gids = await _gids(calls, base)
    wrong: int = await calls.run("mend", 0, "groups", "", *gids)
    for state in _STATES:
        wrong += await _drop_left_over(calls, base, state)
        lanes = [f"{base}:g:{gid}:wait" for gid in gids] if state == "wait" else []
        for lane in [f"{base}:{state}", *lanes]:
            wrong += await _add_missing(calls, state, lane)
    return wrong


async def _drop_left_over(calls: Calls, base: str, state: str) -> int:
    wrong, cursor = 0, b"0"
    while True:
        cursor, flat = await calls.redis.call(
            "ZSCAN", f"{base}:idx:{state}", cursor, "COUNT", _STEP
        )
        for start in range(0, len(flat), 2 * _STEP):
            wrong += await calls.run("mend", 0, "idx", state, *flat[start : start + 2 * _STEP : 2])
        if cursor == b"0":
            return wrong


async def _add_missing(calls: Calls, state: str, lane: str) -> int:
    read = "ZRANGE" if state in ("active", "delayed") else "LRANGE"
    wrong, start = 0, 0
    while True:
        ids: list[Any] = await calls.redis.call(read, lane, start, start + _STEP - 1)
        if ids:
            wrong += await calls.run("mend", 0, "lane", state, *ids)
        if len(ids) < _STEP:
            return wrong
        start += _STEP


async def _gids(calls: Calls, base: str) -> list[str]:
    """All groups that have a list or a count; walks the keys of the server in bounded steps."""
    found: set[str] = set()
    prefix = f"{base}:g:"
    # The braces of the base are no glob; brackets cannot stand in a queue's name.
    cursor: Arg = 0
    while True:
        cursor, keys = await calls.redis.call(
            "SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", 2 * _STEP
        )
        for key in keys:
            gid, _, kind = key.decode()[len(prefix) :].rpartition(":")
            if kind in ("wait", "inflight"):
                found.add(gid)
        if cursor == b"0":
            return sorted(found)
