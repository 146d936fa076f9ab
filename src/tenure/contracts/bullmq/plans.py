"""Schedules and flows of the seam as BullMQ has them: job schedulers, and parents with children.

A scheduler's next job is stored when the one before it is picked up, so one job waits while no
worker runs: what BullMQ makes of missed times is `missed="one"`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from tenure.contracts.bullmq.options import (
    CONTRACT,
    SHORT,
    Options,
    long_names,
    unpack_options,
    whole,
)
from tenure.contracts.bullmq.producer import Flow, Producer
from tenure.contracts.bullmq.records import read_children
from tenure.contracts.bullmq.schedulers import Scheduler, read_schedulers
from tenure.contracts.bullmq.scripts import Scripts
from tenure.core.errors import InvalidJob
from tenure.core.job import (
    Children,
    JobTemplate,
    NewJob,
    Schedule,
    Submitted,
    template_of,
)
from tenure.core.lease import Lease
from tenure.plans.flow import another_flow, steps_of
from tenure.store.redis import Redis
from tenure.store.redis_queue import number, read_all

# Our field in a scheduler's hash, which Node ignores.
_OWN = "tenure"
_DECLARED = "declared"


class BullmqFlows:
    """Flows as BullMQ has them: a parent waits for its children, and fails if one of them does."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._prefix = options.key_prefix
        self._producer = Producer(redis, options)

    async def start(self, flow_id: str, stages: Sequence[Sequence[NewJob]]) -> Sequence[Submitted]:
        """Store the whole flow in one transaction: the last job is the root."""
        steps = steps_of(flow_id, stages)
        if await self._is_stored(flow_id, steps):
            return [Submitted(job.job_id, "replayed") for job in steps[0]]
        flows: list[Flow] = []
        for jobs in steps[:-1]:
            flows = [_flow(job, flows, failParentOnFailure=True) for job in jobs]
        (last,) = steps[-1]
        await self._producer.add_flow(_flow(last, flows))
        return [Submitted(job.job_id, "created") for job in steps[0]]

    async def _is_stored(self, flow_id: str, steps: Sequence[Sequence[NewJob]]) -> bool:
        """Whether the flow is there already; raises `Conflict` if jobs of another one are.

        BullMQ ignores a job whose id it has, and would mix the two.
        """
        jobs = [job for stage in steps for job in stage]
        fields = ("name", "data", "parentKey")
        asked = [("HMGET", self._prefix + job.job_id, *fields) for job in jobs]
        stored = [row or (None,) * len(fields) for row in await read_all(self._redis, asked)]
        if all(row[0] is None for row in stored):
            return False
        same = all(
            row[0] is None or (row[0] == job.task.encode() and row[1] == job.payload)
            for row, job in zip(stored, jobs, strict=True)
        )
        name, _, parent = stored[-1]
        if not same or name is None or parent is not None:
            raise another_flow(flow_id)
        return True

    async def finished(self, job_id: str, result: bytes) -> Sequence[Submitted]:
        """Nothing to do: the settle of a child leads to its parent."""
        return ()

    async def before(self, job_id: str) -> Sequence[str]:
        """The children that have not ended. All jobs of a flow are stored from the beginning."""
        pending = (await read_children(self._redis, self._prefix + job_id)).pending
        own = [key.removeprefix(self._prefix) for key in pending if key.startswith(self._prefix)]
        return [child_id for child_id in own if ":" not in child_id]

    async def children(self, lease: Lease) -> Children:
        """The children of a job."""
        return await read_children(self._redis, self._prefix + lease.job_id)


def _flow(job: NewJob, children: Sequence[Flow], **more: Any) -> Flow:
    options = _long_options(template_of(job)) | {"jobId": job.job_id, **more}
    if job.delay_ms:
        options["delay"] = job.delay_ms
    data = msgspec.Raw(job.payload)
    return Flow(name=job.task, data=data, options=options, children=children)


class BullmqSchedules:
    """The job schedulers of one queue."""

    def __init__(self, redis: Redis, options: Options, scripts: Scripts) -> None:
        self._redis = redis
        self._prefix = options.key_prefix
        self._scheduler = Scheduler(redis, scripts)

    async def put(self, schedule: Schedule) -> Schedule:
        """Set up a scheduler, or change it; one that is the same already is left alone."""
        if schedule.missed != "one":
            raise InvalidJob(
                f"schedule {schedule.name!r}: bullmq's job schedulers make one job of the times "
                f"that were missed; missed={schedule.missed!r} is for inbox, memory, omniq, plane "
                "and streams",
                contract=CONTRACT,
            )
        template = schedule.template
        await self._scheduler.upsert(
            schedule.name,
            _repeat(schedule),
            name=template.task,
            data=template.payload.encode(),
            opts=msgspec.json.encode(_job_options(template)),
            own={_OWN: _DECLARED} if schedule.declared else {},
            only_changed=True,
        )
        stored_now = {each.name: each for each in await self.list()}
        return stored_now.get(schedule.name, schedule)

    async def list(self) -> Sequence[Schedule]:
        """All schedulers, the next one due first."""
        found = await read_schedulers(self._redis, self._prefix)
        return [_schedule(name, next_ms, raw) for name, next_ms, raw in found]

    async def remove(self, name: str) -> bool:
        """Remove a scheduler and its delayed job; False if there is none."""
        return await self._scheduler.remove(name)

    async def enqueue_due(
        self, submit: Callable[[Sequence[NewJob]], Awaitable[Sequence[Submitted]]], ahead_ms: int
    ) -> Sequence[Schedule]:
        """Nothing to do: the claim of a scheduler's job stores the next one."""
        return ()


def _repeat(schedule: Schedule) -> dict[str, Any]:
    """The repeat options; `every` counts from 1970, as with the other contracts."""
    if schedule.every_ms:
        return {"every": schedule.every_ms, "offset": 0}
    return {"pattern": schedule.cron, "tz": schedule.tz}


def _job_options(template: JobTemplate) -> dict[str, Any]:
    given = _long_options(template)
    return {SHORT.get(name, name): value for name, value in given.items()}


def _long_options(template: JobTemplate) -> dict[str, Any]:
    """The job options under BullMQ's own names."""
    given = long_names(template.options)
    if template.max_attempts:
        given["attempts"] = template.max_attempts
    if template.priority:
        given["priority"] = template.priority
    return given


def _schedule(name: str, next_ms: int, raw: dict[str, bytes]) -> Schedule:
    def text(field: str) -> str:
        return raw.get(field, b"").decode(errors="replace")

    options = unpack_options(raw.get("opts", b"{}"))  # other programs may have stored anything
    return Schedule(
        name=name,
        template=JobTemplate(
            task=text("name"),
            payload=text("data") or "{}",
            priority=whole(options.pop("priority", 0)) or 0,
            max_attempts=whole(options.pop("attempts", 0)) or None,
            options=options,
        ),
        cron=text("pattern"),
        every_ms=number(raw.get("every")),
        tz=text("tz"),
        declared=text(_OWN) == _DECLARED,
        next_ms=next_ms,
    )
