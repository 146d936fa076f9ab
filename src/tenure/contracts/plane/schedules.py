"""Schedules of a plane over HTTP. The plane stores their jobs itself, with each round of upkeep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Annotated

import msgspec
from msgspec import Meta

from tenure.contracts.plane.schemas import BODY_BYTES_MAX, RequestBody
from tenure.core.endpoint import Answer, Call, Caller, Endpoint, Refused, Reply, Right
from tenure.core.job import Missed, NewJob, Schedule, template_of
from tenure.core.seam import Schedules
from tenure.plans.schedule import new_schedule
from tenure.store.batcher import TooManyWaiting, Turns

WAITING_MAX = 64
"""So many requests of one key wait for their turn."""
_YEAR_MS = 366 * 24 * 3_600_000
_EXAMPLE = {"task": "report", "payload": {"days": 1}, "cron": "0 3 * * *", "tz": "Europe/Berlin"}

CheckStreams = Callable[[Caller, Iterable[str]], None]
"""Refuses streams that the caller's key is not good for."""

_Text = Annotated[str, Meta(max_length=512)]
_Count = Annotated[int, Meta(ge=-(2**53), le=2**53)]


class NewPlaneSchedule(RequestBody, frozen=True):
    """When jobs are stored, by `cron` in the time zone `tz` or every `every_ms`, and what jobs."""

    task: _Text
    payload: msgspec.Raw
    cron: Annotated[str, Meta(max_length=200, description="Such as `0 3 * * *`.")] = ""
    tz: Annotated[str, Meta(max_length=100, description="Of `cron`; UTC if left out.")] = ""
    every_ms: Annotated[int, Meta(ge=0, le=_YEAR_MS)] = 0
    missed: Annotated[Missed, Meta(description="What times make that passed unseen.")] = "one"
    stream: Annotated[str, Meta(max_length=100, description="A stream of this plane.")] = ""
    priority: _Count = 0
    max_attempts: _Count | None = None
    ttl_ms: _Count | None = None
    declared: Annotated[bool, Meta(description="A task declares it, not a client.")] = False


class PlaneSchedule(NewPlaneSchedule, frozen=True):
    """A schedule as it is: `next_ms` is its next time, `last_id` the job of the last one."""

    name: str = ""
    next_ms: int = 0
    last_ms: int = 0
    last_id: str = ""
    error: str = ""


class PlaneSchedules(msgspec.Struct, frozen=True):
    """The schedules of a plane, the next one due first."""

    schedules: list[PlaneSchedule]


class Unscheduled(msgspec.Struct, frozen=True):
    """Whether there was such a schedule."""

    removed: bool


@asynccontextmanager
async def in_turn(turns: Turns, call: Call) -> AsyncIterator[None]:
    """Hold a turn of the caller's key, or raise `Refused` if too many of its requests wait."""
    try:
        async with turns.of(call.caller.who):
            yield
    except TooManyWaiting:
        raise Refused(
            "rate_limited",
            f"{WAITING_MAX} such requests of this key wait for their turn: wait for their answers",
        ) from None


class ScheduleRoutes:
    """The endpoints. A key for some streams reaches the schedules of those streams.

    Each reads all schedules, of which there may be thousands, so those of a key take turns.
    """

    def __init__(self, schedules: Schedules, streams: tuple[str, ...], check: CheckStreams) -> None:
        self._schedules = schedules
        self._streams = streams
        self._check = check
        self._turns = Turns(1, waiting_max=WAITING_MAX)

    async def show(self, call: Call) -> Answer:
        """Those that the caller's key is good for."""
        kept = call.caller.streams
        async with in_turn(self._turns, call):
            schedules = await self._schedules.list()
            found = await asyncio.to_thread(
                lambda: [view for each in schedules if _is_sound(view := view_of(each))]
            )
        shown = [each for each in found if not kept or self._stream(each) in kept]
        return Answer(200, PlaneSchedules(shown))

    async def put(self, call: Call) -> Answer:
        """Store it, or change the one of this name."""
        stream = self._stream(call.body)
        if stream not in self._streams:
            raise Refused("invalid", f"there are the streams {', '.join(self._streams)}")
        self._check(call.caller, [stream])
        async with in_turn(self._turns, call):
            # In a thread: of a pattern that has no time, fifty years are looked through.
            schedule = await asyncio.to_thread(read_schedule, call.path["name"], call.body)
            await self._check_stored(call)
            return Answer(200, view_of(await self._schedules.put(schedule)))

    async def remove(self, call: Call) -> Answer:
        """Remove it; the jobs that it has stored stay."""
        async with in_turn(self._turns, call):
            await self._check_stored(call)
            return Answer(200, Unscheduled(await self._schedules.remove(call.path["name"])))

    async def _check_stored(self, call: Call) -> None:
        """Refuse to change a schedule that is of a stream for which the key is not good."""
        if call.caller.streams:
            found = [
                each for each in await self._schedules.list() if each.name == call.path["name"]
            ]
            self._check(call.caller, [self._stream(view_of(each)) for each in found])

    def _stream(self, schedule: NewPlaneSchedule) -> str:
        return schedule.stream or self._streams[0]

    def endpoints(self) -> list[Endpoint]:
        """The endpoints for the gateway."""
        path = "/v1/plane/schedules/{name}"
        return [
            Endpoint(
                method="GET",
                path="/v1/plane/schedules",
                operation="listPlaneSchedules",
                summary="The schedules of the plane",
                right=Right("jobs:work", "all", streams=True),
                handle=self.show,
                replies={200: Reply("The next one due comes first.", PlaneSchedules)},
                tag="plane",
                is_search=True,
            ),
            Endpoint(
                method="PUT",
                path=path,
                operation="putPlaneSchedule",
                summary="Store or change a schedule of the plane",
                description="The plane stores each job once, at its time, with the id `name@time`.",
                right=Right("jobs:work", "all", does="schedule", streams=True),
                handle=self.put,
                takes=NewPlaneSchedule,
                example=_EXAMPLE,
                replies={200: Reply("The schedule as it is now.", PlaneSchedule)},
                problems=(400, 408, 409, 413, 415, 422),
                tag="plane",
                bytes_max=BODY_BYTES_MAX,
            ),
            Endpoint(
                method="DELETE",
                path=path,
                operation="removePlaneSchedule",
                summary="Remove a schedule of the plane",
                right=Right("jobs:work", "all", does="unschedule", streams=True),
                handle=self.remove,
                replies={200: Reply("Whether there was one.", Unscheduled)},
                problems=(409,),
                tag="plane",
            ),
        ]


def read_schedule(name: str, given: NewPlaneSchedule) -> Schedule:
    """The schedule of a request; raises `UsageError` for one that cannot work."""
    try:
        payload = bytes(given.payload)
        payload.decode()
    except UnicodeDecodeError as error:
        raise Refused("bad_json", f"the body is not UTF-8: {error}") from None
    return new_schedule(
        _job_of(given, payload),
        name=name,
        cron=given.cron,
        every_s=given.every_ms / 1000 if given.every_ms else None,
        tz=given.tz,
        missed=given.missed,
        declared=given.declared,
    )


def _job_of(given: NewPlaneSchedule, payload: bytes) -> NewJob:
    return NewJob(
        task=given.task,
        payload=payload,
        priority=given.priority,
        max_attempts=given.max_attempts,
        ttl_ms=given.ttl_ms,
        options={"stream": given.stream} if given.stream else {},
    )


def view_of(schedule: Schedule) -> PlaneSchedule:
    """A schedule as it goes over HTTP."""
    template = schedule.template
    return PlaneSchedule(
        name=schedule.name,
        task=template.task,
        payload=msgspec.Raw(template.payload.encode()),
        cron=schedule.cron,
        tz=schedule.tz if schedule.cron else "",
        every_ms=schedule.every_ms,
        missed=schedule.missed,
        stream=template.options.get("stream", ""),
        priority=template.priority,
        max_attempts=template.max_attempts,
        ttl_ms=template.ttl_ms,
        declared=schedule.declared,
        next_ms=schedule.next_ms,
        last_ms=schedule.last_ms,
        last_id=schedule.last_id,
        error=schedule.error,
    )


def _is_sound(view: PlaneSchedule) -> bool:
    """Whether clients can read it: another program may have stored any payload, name or number."""
    try:
        msgspec.json.decode(msgspec.json.encode(view), type=PlaneSchedule)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def schedule_of(view: PlaneSchedule) -> Schedule:
    """The schedule that an answer shows, which may be one that would be refused here."""
    names = ("name", "cron", "every_ms", "missed", "declared")
    state = ("next_ms", "last_ms", "last_id", "error")
    return Schedule(
        template=template_of(_job_of(view, bytes(view.payload))),
        tz=view.tz or "UTC",
        **{name: getattr(view, name) for name in (*names, *state)},
    )
