"""Job schedulers: a template that makes one job after the other, by an interval or a cron pattern.

There is no clock process. The job that a scheduler made leads to the next one when a worker picks
it up, whichever worker that is; so a Python worker must do as a Node worker would.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from tenure.contracts.bullmq import cron
from tenure.contracts.bullmq.scripts import Scripts
from tenure.core.errors import UsageError
from tenure.store.redis import Arg, Redis

_FIELDS = ("tz", "limit", "pattern", "endDate", "every", "startDate", "offset")


class Picked(msgspec.Struct, frozen=True):
    """A job that a scheduler made, as it was picked up."""

    job_id: str
    name: bytes
    data: bytes
    opts: bytes


class Scheduler:
    """The schedulers of one queue."""

    def __init__(self, redis: Redis, scripts: Scripts) -> None:
        self._redis = redis
        self._scripts = scripts

    async def follow(self, scheduler_id: str, job: Picked) -> str:
        """Make the job after `job`, which was just picked up; "" when there is none to make.

        Raises `UsageError` when the next run cannot be computed here.
        """
        told = msgspec.json.decode(job.opts)
        repeat = told.get("repeat") if isinstance(told, dict) else None
        if not isinstance(repeat, dict):
            return ""
        now = await self._redis.server_time_ms()
        count = _int(repeat.get("count")) + 1
        if repeat.get("limit") is not None and count > _int(repeat["limit"]):
            return ""
        if repeat.get("endDate") and now > _ms(repeat["endDate"]):
            return ""
        following = {name: value for name, value in repeat.items() if name != "immediately"}
        following["count"] = count
        stem, next_ms = f"repeat:{scheduler_id}:", ""
        after = max(now, _int(told.get("prevMillis")))
        if pattern := repeat.get("pattern") or repeat.get("cron"):
            at_ms = _next(str(pattern), repeat, after)
            if repeat.get("endDate") and at_ms > _ms(repeat["endDate"]):
                return ""
            next_ms = str(at_ms)
        elif scheduler_id.count(":") > 3 and not job.job_id.startswith(stem):
            # As BullMQ up to 3 kept them: on the grid of the clock.
            every = max(1, _int(repeat.get("every")))
            next_ms = str(after // every * every + every)
        if not job.job_id.startswith(stem):
            stem = job.job_id[: job.job_id.rfind(":") + 1]
        return await self._run(
            "follow",
            scheduler_id,
            next_ms,
            following,
            job.job_id,
            job.data,
            job.opts,
            job.name,
            stem,
        )

    async def upsert(
        self,
        scheduler_id: str,
        repeat: Mapping[str, Any],
        *,
        name: str,
        data: bytes,
        opts: bytes,
    ) -> str:
        """Set a scheduler up, or change it; returns the id of its next job."""
        if bool(repeat.get("every")) == bool(repeat.get("pattern")):
            raise UsageError("a scheduler has either `every` (ms) or `pattern` (cron)")
        if repeat.get("immediately") and repeat.get("startDate"):
            raise UsageError("a scheduler has either `immediately` or `startDate`")
        now = await self._redis.server_time_ms()
        kept = {key: value for key, value in repeat.items() if value is not None}
        next_ms: Arg = now if kept.pop("immediately", None) and repeat.get("pattern") else ""
        if repeat.get("pattern") and not next_ms:
            next_ms = _next(repeat["pattern"], repeat, now)
        fields: list[Arg] = []
        for field in _FIELDS:
            if field in kept:
                value = kept[field]
                fields += (field, _ms(value) if field.endswith("Date") else value)
        rest: tuple[Arg, ...] = (data, opts, *fields)
        return await self._run("upsert", scheduler_id, next_ms, {**kept, "count": 1}, name, *rest)

    async def remove(self, scheduler_id: str) -> bool:
        """Take a scheduler away; a job of it that waits already still runs."""
        return bool(await self._run("remove", scheduler_id, "", {}, ""))

    async def _run(
        self, verb: str, scheduler_id: str, next_ms: Arg, repeat: Any, name: str, *rest: Arg
    ) -> str:
        args: tuple[Arg, ...] = (verb, scheduler_id, next_ms, msgspec.json.encode(repeat), name)
        reply = await self._scripts.run("schedule", *args, *rest)
        return reply.decode() if reply else ""


def _next(pattern: str, repeat: Mapping[str, Any], after_ms: int) -> int:
    """The next time of a pattern, by the options that BullMQ hands to its cron parser."""
    if repeat.get("startDate"):
        after_ms = max(after_ms, _ms(repeat["startDate"]))
    tz = "UTC" if repeat.get("utc") is True else str(repeat.get("tz") or "")
    return cron.next_after(pattern, after_ms, tz, seed=str(repeat.get("hashSeed") or ""))


def _int(value: Any) -> int:
    """A count in the options of another program; 0 for what is none."""
    try:
        return int(value or 0)
    except (TypeError, ValueError, OverflowError):
        return 0


def _ms(moment: Any) -> int:
    """A date as BullMQ takes it: milliseconds, or an ISO text."""
    try:
        if isinstance(moment, int | float):
            return int(moment)
        return int(datetime.fromisoformat(str(moment)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise UsageError(f"{moment!r} is no date; write milliseconds or an ISO text") from None
