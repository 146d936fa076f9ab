"""Repairs a queue that other programs left inconsistent, in steps that do not block the server.

OmniQ 1.x moves jobs and does not update `stats` and `idx`. If a leased job's hash is deleted, its
group's slot stays taken. A lane, in OmniQ's words, is the list or sorted set that holds the ids of
the jobs of one state, or of one group that wait. If a lane is overwritten, its jobs are in no lane.
Upkeep detects this and calls `repair`.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from tenure.contracts.omniq.calls import Calls
from tenure.contracts.omniq.options import queue_base
from tenure.store.redis import Arg
from tenure.store.redis_queue import read_all

_STEP = 500
_OVERLAP = 100
_STATES = ("wait", "active", "delayed", "failed", "completed")
# Every step of a job changes at least one of these fields. `tn` is ours (see lua/include/head.lua).
_CHANGED = ("state", "attempt", "updated_ms", "lease_token", "tn")


async def repair(calls: Calls, queue: str) -> int:
    """Compare lanes, index tables, groups and counters with the jobs; returns how many differed."""
    base = queue_base(queue).encode()
    noted = await _read(calls, "HGET", base + b":upkeep", "recount") or b""
    jobs, gids = await _jobs_and_gids(calls, base)
    # This also quarantines keys of the wrong type.
    wrong: int = await calls.run("mend", 0, "groups", "", *gids)
    await _discard_placed(calls, base, gids, jobs)
    wrong += await _restore_strays(calls, base, gids, jobs)
    for state in _STATES:
        for lane in _lanes(base, state, gids):
            wrong += await _mend(calls, "lane", state, await _ids(calls, state, lane))
        wrong += await _drop_left_over(calls, base, state)
    wrong += await calls.run("mend", 0, "groups", noted, *gids)
    return wrong


def _lanes(base: bytes, state: str, gids: list[bytes]) -> list[bytes]:
    grouped = [base + b":g:" + gid + b":wait" for gid in gids] if state == "wait" else []
    return [base + b":" + state.encode(), *grouped]


async def _discard_placed(calls: Calls, base: bytes, gids: list[bytes], jobs: set[bytes]) -> None:
    for state in _STATES:
        for lane in _lanes(base, state, gids):
            jobs.difference_update(await _ids(calls, state, lane))


async def _restore_strays(calls: Calls, base: bytes, gids: list[bytes], jobs: set[bytes]) -> int:
    """Put jobs that are in no lane where their hashes say; returns how many there were.

    Jobs move while this runs. So the hashes are read first, and then all lanes again. If the hash
    of a job is still the same when the script runs, the job has not moved, and no lane has it.
    """
    seen: dict[bytes, list[bytes]] = {}
    found = sorted(jobs)
    for start in range(0, len(found), _STEP):
        ids = found[start : start + _STEP]
        reads = [("HMGET", base + b":job:" + job_id, *_CHANGED) for job_id in ids]
        for job_id, values in zip(ids, await read_all(calls.redis, reads), strict=True):
            seen[job_id] = [value or b"" for value in values or [b""] * len(_CHANGED)]
    if seen:
        await _discard_placed(calls, base, gids, jobs)
    wrong = 0
    strays = [job_id for job_id in seen if job_id in jobs]
    for start in range(0, len(strays), _STEP):
        rows = [(job_id, *seen[job_id]) for job_id in strays[start : start + _STEP]]
        wrong += await calls.run("mend", 0, "stray", "", *chain.from_iterable(rows))
    return wrong


async def _mend(calls: Calls, table: str, state: str, ids: list[bytes]) -> int:
    wrong = 0
    for start in range(0, len(ids), _STEP):
        wrong += await calls.run("mend", 0, table, state, *ids[start : start + _STEP])
    return wrong


async def _ids(calls: Calls, state: str, lane: bytes) -> list[bytes]:
    """The ids in a lane.

    Claims take jobs from its front while it is read, and the others move forward. So pages overlap,
    and a page that begins with an unknown id is read again from an earlier index.
    """
    read = "ZRANGE" if state in ("active", "delayed") else "LRANGE"
    found: dict[bytes, None] = {}
    at = 0
    while True:
        page: list[bytes] = await _read(calls, read, lane, at, at + 2 * _STEP - 1) or []
        if at and (not page or page[0] not in found):
            at = max(0, at - _STEP)
            continue
        found.update(dict.fromkeys(page))
        if len(page) < 2 * _STEP:
            return list(found)
        at += len(page) - _OVERLAP


async def _drop_left_over(calls: Calls, base: bytes, state: str) -> int:
    wrong: int = await calls.run("mend", 0, "idx", state)
    cursor = b"0"
    while True:
        index = base + b":idx:" + state.encode()
        cursor, flat = await _read(calls, "ZSCAN", index, cursor, "COUNT", _STEP) or (b"0", [])
        wrong += await _mend(calls, "idx", state, flat[::2])
        if cursor == b"0":
            return wrong


async def _read(calls: Calls, *command: Arg) -> Any:
    return (await read_all(calls.redis, [command]))[0]


async def _jobs_and_gids(calls: Calls, base: bytes) -> tuple[set[bytes], list[bytes]]:
    """All jobs, and all groups that have a list or a count; scans the server's keys in steps."""
    jobs: set[bytes] = set()
    gids: set[bytes] = set()
    job, group = base + b":job:", base + b":g:"
    # The pattern is safe: braces mean nothing in a glob, and a queue's name has no brackets.
    async for keys in calls.redis.scan(base + b":*"):
        for key in keys:
            if key.startswith(job):
                jobs.add(key[len(job) :])
            elif key.startswith(group):
                gid, _, kind = key[len(group) :].rpartition(b":")
                if kind in (b"wait", b"inflight"):
                    gids.add(gid)
    return jobs, sorted(gids)
