"""Job schedulers: a template that makes one job after the other, by an interval or a cron pattern.

There is no clock process. The job that a scheduler made leads to the next one when a worker picks
it up, whichever worker that is; so a Python worker must do as a Node worker would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from leasehold.contracts.bullmq import cron
from leasehold.contracts.bullmq.scripts import SCRIPTS
from leasehold.core.errors import UsageError
from leasehold.store.redis import Arg, Redis

_FIELDS = ("tz", "limit", "pattern", "endDate", "every", "startDate", "offset")


class Scheduler:
    """The schedulers of one queue."""

    def __init__(self, redis: Redis, key_prefix: str, keys: Sequence[str]) -> None:
        self._redis = redis
        self._prefix = key_prefix
        self._keys = keys

    async def follow(self, scheduler_id: str, job_id: str, opts: bytes) -> str:
        """Make the job after `job_id`, which was just picked up; "" when there is none to make."""
        told = msgspec.json.decode(opts)
        repeat = told.get("repeat") if isinstance(told, dict) else None
        if not isinstance(repeat, dict):
            return ""
        now = await self._redis.server_time_ms()
        count = int(repeat.get("count") or 0) + 1
        if repeat.get("limit") and count > int(repeat["limit"]):
            return ""
        if repeat.get("endDate") and now > _ms(repeat["endDate"]):
            return ""
        following = {**repeat, "count": count}
        next_ms: Arg = ""
        if repeat.get("pattern"):
            after = max(now, int(told.get("prevMillis") or 0))
            next_ms = cron.next_after(repeat["pattern"], after, repeat.get("tz") or "")
        return await self._run("follow", scheduler_id, next_ms, following, job_id)

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
            after = max(now, _ms(repeat["startDate"]) if repeat.get("startDate") else 0)
            next_ms = cron.next_after(repeat["pattern"], after, repeat.get("tz") or "")
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
        args: tuple[Arg, ...] = (
            self._prefix, verb, scheduler_id, next_ms, msgspec.json.encode(repeat), name, *rest,
        )  # fmt: skip
        reply = await self._redis.run(SCRIPTS["schedule"], self._keys, args)
        return reply.decode() if reply else ""


def _ms(moment: Any) -> int:
    """A date as BullMQ takes it: milliseconds, or an ISO text."""
    if isinstance(moment, int | float):
        return int(moment)
    return int(datetime.fromisoformat(str(moment)).timestamp() * 1000)
