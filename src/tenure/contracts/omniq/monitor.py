"""Read-only views of queues: counters, lanes, groups, single jobs.

They read the same keys as OmniQ's own monitor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from tenure.contracts.omniq.options import QUEUE_NAME, queue_base
from tenure.store.redis import Arg, Redis
from tenure.store.redis_queue import fields_of, number, read_all

MonitorLane = Literal["wait", "active", "delayed", "failed", "completed"]


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of a queue, as kept in `{queue}:stats`."""

    queue: str
    paused: bool
    waiting: int = 0
    group_waiting: int = 0
    waiting_total: int = 0
    active: int = 0
    delayed: int = 0
    failed: int = 0
    completed_kept: int = 0
    groups_ready: int = 0
    last_activity_ms: int = 0
    last_enqueue_ms: int = 0
    last_reserve_ms: int = 0
    last_finish_ms: int = 0


class GroupReady(msgspec.Struct, frozen=True):
    """A group that has had work and a free slot since `score_ms`."""

    gid: str
    score_ms: int


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a group."""

    gid: str
    inflight: int
    limit: int
    ready: bool
    waiting_count: int


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a job's hash."""

    job_id: str
    state: str = ""
    gid: str = ""
    attempt: int = 0
    max_attempts: int = 0
    timeout_ms: int = 0
    backoff_ms: int = 0
    lease_token: str = ""
    lock_until_ms: int = 0
    due_ms: int = 0
    payload: str = ""
    last_error: str = ""
    last_error_ms: int = 0
    created_ms: int = 0
    updated_ms: int = 0
    queued_ms: int = 0
    first_started_ms: int = 0
    last_started_ms: int = 0
    completed_ms: int = 0
    failed_ms: int = 0


class LaneJob(msgspec.Struct, frozen=True):
    """A job in a lane, and when it entered it."""

    lane: MonitorLane
    entered_ms: int
    job: JobInfo


class QueueOverview(msgspec.Struct, frozen=True, kw_only=True):
    """Counters, ready groups, and the oldest jobs of each lane."""

    stats: QueueStats
    ready_groups: list[GroupReady]
    active: list[LaneJob]
    delayed: list[LaneJob]
    failed: list[LaneJob]
    completed: list[LaneJob]


_STATS = [field.name for field in msgspec.structs.fields(QueueStats)][2:]
_TEXTS = frozenset({"job_id", "state", "gid", "lease_token", "payload", "last_error"})
_JOB = [field.name for field in msgspec.structs.fields(JobInfo)][1:]


class Monitor:
    """Reads queues of one server."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def queues(self) -> list[str]:
        """The names of all queues that have counters; scans the keys in bounded steps."""
        found: set[str] = set()
        async for keys in self._redis.scan("{*}:stats"):
            names = (key[1 : -len("}:stats")].decode(errors="replace") for key in keys)
            found.update(name for name in names if QUEUE_NAME.fullmatch(name))
        return sorted(found)

    async def stats(self, queue: str) -> QueueStats:
        """The counters of one queue; zeros for an unused one."""
        base = queue_base(queue)
        values, paused = await self._read(
            ("HMGET", f"{base}:stats", *_STATS), ("EXISTS", f"{base}:paused")
        )
        counters = {name: number(value) for name, value in zip(_STATS, values or (), strict=False)}
        return QueueStats(queue=base[1:-1], paused=bool(paused), **counters)

    async def stats_many(self, queues: Iterable[str] | None = None) -> list[QueueStats]:
        """The counters of the queues named, or of all."""
        named = await self.queues() if queues is None else queues
        return [await self.stats(queue) for queue in named]

    async def job(self, queue: str, job_id: str) -> JobInfo | None:
        """One job, or None."""
        (flat,) = await self._read(("HGETALL", f"{queue_base(queue)}:job:{job_id}"))
        return _info(job_id, fields_of(flat)) if flat else None

    async def overview(self, queue: str, samples_per_lane: int = 10) -> QueueOverview:
        """The state of a queue, with some jobs of each lane."""
        lanes: tuple[MonitorLane, ...] = ("active", "delayed", "failed", "completed")
        samples = {
            lane: await self.lane_page(queue, lane, limit=samples_per_lane) for lane in lanes
        }
        return QueueOverview(
            stats=await self.stats(queue), ready_groups=await self.groups_ready(queue), **samples
        )

    async def lane_page(
        self,
        queue: str,
        lane: MonitorLane,
        *,
        offset: int = 0,
        limit: int = 25,
        reverse: bool = False,
    ) -> list[LaneJob]:
        """Jobs of a lane by when they entered it, oldest first unless `reverse`."""
        read, index = "ZREVRANGE" if reverse else "ZRANGE", f"{queue_base(queue)}:idx:{lane}"
        (found,) = await self._read((read, index, offset, offset + limit - 1, "WITHSCORES"))
        return await self._lane_jobs(queue, lane, fields_of(found))

    async def find_jobs(
        self, queue: str, lane: MonitorLane, job_ids: Iterable[str]
    ) -> list[LaneJob]:
        """The given jobs, without those that are not in this lane."""
        ids = list(job_ids)
        if not ids:
            return []
        (scores,) = await self._read(("ZMSCORE", f"{queue_base(queue)}:idx:{lane}", *ids))
        entered = {job: score for job, score in zip(ids, scores or (), strict=False) if score}
        return await self._lane_jobs(queue, lane, entered)

    async def groups_ready(
        self, queue: str, *, offset: int = 0, limit: int = 200
    ) -> list[GroupReady]:
        """Groups that have work and a free slot, the next one first."""
        ready = f"{queue_base(queue)}:groups:ready"
        (found,) = await self._read(("ZRANGE", ready, offset, offset + limit - 1, "WITHSCORES"))
        return [GroupReady(gid, number(score)) for gid, score in fields_of(found).items()]

    async def group_status(
        self, queue: str, gids: Iterable[str], *, default_limit: int = 1
    ) -> list[GroupStatus]:
        """The state of each group."""
        base = queue_base(queue)
        named = list(gids)
        commands: list[tuple[Arg, ...]] = []
        for gid in named:
            commands.append(("MGET", f"{base}:g:{gid}:inflight", f"{base}:g:{gid}:limit"))
            commands.append(("LLEN", f"{base}:g:{gid}:wait"))
            commands.append(("ZSCORE", f"{base}:groups:ready", gid))
        replies = iter(await self._read(*commands))
        return [
            GroupStatus(
                gid=gid,
                inflight=max(0, number(counts[0])),
                limit=number(counts[1]) if number(counts[1]) > 0 else default_limit,
                ready=score is not None,
                waiting_count=waiting or 0,
            )
            for gid, counts, waiting, score in zip(named, replies, replies, replies, strict=True)
        ]

    async def _lane_jobs(
        self, queue: str, lane: MonitorLane, entered: Mapping[str, bytes]
    ) -> list[LaneJob]:
        base = queue_base(queue)
        flats = await self._read(*[("HGETALL", f"{base}:job:{job_id}") for job_id in entered])
        return [
            LaneJob(lane, number(score), _info(job_id, fields_of(flat)))
            for (job_id, score), flat in zip(entered.items(), flats, strict=True)
        ]

    async def _read(self, *commands: Sequence[Arg]) -> list[Any]:
        return await read_all(self._redis, commands)

    scan_queues = queues
    get_job = job


def _info(job_id: str, fields: dict[str, bytes]) -> JobInfo:
    values: dict[str, Any] = {
        name: fields.get(name, b"").decode(errors="replace")
        if name in _TEXTS
        else number(fields.get(name))
        for name in _JOB
    }
    return JobInfo(job_id=job_id, **values)
