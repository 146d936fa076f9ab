"""Which jobs there are: their ids by state, and the record of each, hash and place together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenure.contracts.bullmq.options import Options, keys
from tenure.contracts.bullmq.records import number, record_of
from tenure.core.errors import ServerError
from tenure.core.job import JobRecord
from tenure.store.redis import Arg, Redis

STATES = (
    *("waiting", "prioritized", "delayed", "active", "waiting-children", "completed", "failed"),
    "paused",
)
_SCAN_MAX = 20_000
_CHUNK = 500
_SLOTS = 4096  # a due time's score is ms * 4096 + its place within the millisecond


class Finder:
    """Reads the jobs of one queue."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._prefix = options.key_prefix
        self._queue = options.queue
        self._keys = keys(options.key_prefix)

    async def newest(self, states: Sequence[str], after: str) -> dict[str, str]:
        """The jobs in these states that come after a cursor, newest first, each with its state.

        BullMQ has no index by time: the ids of the states are read up to a bound, and of each the
        time alone. Whole records, and their places, are for the few that are shown.
        """
        listed = await self._ids(states)
        ids = list(listed)
        times: list[tuple[tuple[int, tuple[int, str]], str]] = []
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            commands: list[tuple[Arg, ...]] = [
                ("HGET", self._prefix + job_id, "timestamp") for job_id in chunk
            ]
            stamps = await self._redis.pipeline(commands)
            times += [
                ((number(stamp), natural(job_id)), job_id)
                for job_id, stamp in zip(chunk, stamps, strict=True)
                if isinstance(stamp, bytes)
            ]
        if after:
            created, _, last_id = after.partition(":")
            last = (int(created), natural(last_id))
            times = [each for each in times if each[0] < last]
        times.sort(reverse=True)
        return {job_id: listed[job_id] for _, job_id in times}

    async def _ids(self, states: Sequence[str]) -> dict[str, str]:
        """The jobs in these states, newest of each first, up to a bound, each with its state."""
        wait, active, prioritized, delayed, paused = self._keys[:5]
        last = _SCAN_MAX - 1
        reads: dict[str, tuple[Arg, ...]] = {
            "waiting": ("LRANGE", wait, 0, last),
            "paused": ("LRANGE", paused, 0, last),
            "active": ("LRANGE", active, 0, last),
            "prioritized": ("ZRANGE", prioritized, 0, last),
            "delayed": ("ZRANGE", delayed, 0, last),
            "waiting-children": ("ZREVRANGE", self._keys[13], 0, last),
            "completed": ("ZREVRANGE", self._keys[11], 0, last),
            "failed": ("ZREVRANGE", self._keys[12], 0, last),
        }
        replies = await self._redis.pipeline([reads[state] for state in states])
        return {
            job_id: state
            for state, reply in zip(states, replies, strict=True)
            if isinstance(reply, list)
            for each in reply
            if (job_id := text_of(each))
        }

    async def between(
        self, states: Sequence[str], start: int, end: int, *, ascending: bool
    ) -> dict[str, str]:
        """The jobs of each state between two places, each with its state.

        A list begins with its newest job, a set with the one that is due, or ended, first.
        """
        wait, active, prioritized, delayed, paused = self._keys[:5]
        lists = {"waiting": wait, "active": active, "paused": paused}
        sets = {"prioritized": prioritized, "delayed": delayed, "waiting-children": self._keys[13]}
        sets |= {"completed": self._keys[11], "failed": self._keys[12]}
        commands: list[tuple[Arg, ...]] = []
        for state in states:
            if state in sets:
                command = "ZRANGE" if ascending else "ZREVRANGE"
                commands.append((command, sets[state], start, end))
            elif ascending:
                commands.append(("LRANGE", lists[state], -(end + 1) if end >= 0 else 0, -start - 1))
            else:
                commands.append(("LRANGE", lists[state], start, end))
        listed: dict[str, str] = {}
        for state, reply in zip(states, await self._redis.pipeline(commands), strict=True):
            if isinstance(reply, ServerError):  # of another type: upkeep puts it aside
                continue
            ids = reversed(reply) if ascending and state in lists else reply
            listed |= {job_id: state for each in ids if (job_id := text_of(each))}
        return listed

    async def records(
        self, ids: Sequence[str], listed: Mapping[str, str] | None = None
    ) -> list[JobRecord | None]:
        """Hash and place of each job; the places are asked for in the same go.

        `listed` says where jobs were a moment ago: then no list is searched for them, which takes
        as long as the list is.
        """
        places = self._places(searches_lists=listed is None)
        found: list[JobRecord | None] = []
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            commands: list[tuple[Arg, ...]] = []
            for job_id in chunk:
                commands.append(("HGETALL", self._prefix + job_id))
                commands += [(command, key, job_id) for command, key, _ in places]
            replies = iter(await self._redis.pipeline(commands))
            for job_id in chunk:
                flat = next(replies)
                stands = [(state, next(replies)) for _, _, state in places]
                otherwise = "unknown" if listed is None else listed[job_id]
                found.append(self._record(job_id, flat, stands, otherwise))
        return found

    def _places(self, *, searches_lists: bool) -> list[tuple[str, str, str]]:
        """Where a job may stand: the command that says so, the key, and the state it means."""
        wait, active, prioritized, delayed, paused = self._keys[:5]
        sets = [
            ("ZSCORE", self._keys[11], "completed"),
            ("ZSCORE", self._keys[12], "failed"),
            ("ZSCORE", delayed, "delayed"),
            ("ZSCORE", prioritized, "prioritized"),
            ("ZSCORE", self._keys[13], "waiting-children"),
        ]
        lists = [("LPOS", active, "active"), ("LPOS", wait, "waiting"), ("LPOS", paused, "paused")]
        return sets + lists if searches_lists else sets

    def _record(
        self, job_id: str, flat: Any, stands: list[tuple[str, Any]], otherwise: str
    ) -> JobRecord | None:
        if not isinstance(flat, list):
            return None  # the key is no hash
        raw: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
        if not raw.get(b"name"):
            return None
        if otherwise == "unknown" and raw.get(b"finishedOn"):
            otherwise = "failed" if b"failedReason" in raw else "completed"
        there = ((state, place) for state, place in stands if isinstance(place, bytes | int))
        state, place = next(there, (otherwise, b"0"))
        due_ms = number(place) // _SLOTS if state == "delayed" else 0
        return record_of(job_id, self._queue, state, raw, due_ms=due_ms)


def natural(job_id: str) -> tuple[int, str]:
    """Ids that BullMQ counts are ordered as numbers."""
    return (int(job_id), "") if job_id.isdecimal() and len(job_id) < 20 else (-1, job_id)


def text_of(job_id: bytes) -> str:
    """An id as text; "" for one that is no text, which no client of BullMQ makes."""
    try:
        return job_id.decode()
    except UnicodeDecodeError:
        return ""
