"""Which jobs there are: their ids by state, and the record of each, hash and place together."""

from __future__ import annotations

from collections.abc import Sequence

from leasehold.contracts.bullmq.options import Options, keys
from leasehold.contracts.bullmq.records import record_of
from leasehold.core.job import JobRecord
from leasehold.store.redis import Arg, Redis

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

    async def ids(self, states: Sequence[str]) -> list[str]:
        """The ids of the jobs in these states, newest of each first, up to a bound."""
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
        return list(dict.fromkeys(each.decode() for reply in replies for each in reply))

    async def records(self, ids: Sequence[str]) -> list[JobRecord | None]:
        """Hash and place of each job; the places are asked for in the same go."""
        found: list[JobRecord | None] = []
        wait, active, prioritized, delayed, paused = self._keys[:5]
        sets = (
            (self._keys[11], "completed"),
            (self._keys[12], "failed"),
            (delayed, "delayed"),
            (prioritized, "prioritized"),
            (self._keys[13], "waiting-children"),
        )
        lists = ((active, "active"), (wait, "waiting"), (paused, "paused"))
        width = 1 + len(sets) + len(lists)
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            commands: list[tuple[Arg, ...]] = []
            for job_id in chunk:
                commands.append(("HGETALL", self._prefix + job_id))
                commands += [("ZSCORE", key, job_id) for key, _ in sets]
                commands += [("LPOS", key, job_id) for key, _ in lists]
            replies = await self._redis.pipeline(commands)
            names = [name for _, name in (*sets, *lists)]
            for at, job_id in enumerate(chunk):
                flat, *places = replies[at * width : (at + 1) * width]
                state, place = next(
                    ((n, p) for n, p in zip(names, places, strict=True) if p is not None),
                    ("unknown", b""),
                )
                raw = dict(zip(flat[::2], flat[1::2], strict=True))
                due_ms = int(float(place)) // _SLOTS if state == "delayed" else 0
                found.append(
                    record_of(job_id, self._queue, state, raw, due_ms=due_ms)
                    if raw.get(b"name")
                    else None
                )
        return found


def place(record: JobRecord) -> tuple[int, tuple[int, str]]:
    """By what jobs are ordered: their time, and their number."""
    return (record.created_ms, natural(record.job_id))


def natural(job_id: str) -> tuple[int, str]:
    """Ids that BullMQ counts are ordered as numbers."""
    return (int(job_id), "") if job_id.isdecimal() else (-1, job_id)
