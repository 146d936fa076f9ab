"""Schedules over the records of a queue: when they are due, and how each time makes one job.

There is no leader. Every worker reads the schedules of its queues with each round of upkeep. It
submits the jobs that are due until the next round, delayed, under ids that follow from schedule and
time, and then moves the schedule on. If two workers do so at once, or one is killed in between, the
same ids are submitted again, and the queue answers with the jobs that it has.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, get_args

import msgspec

from tenure.core.encoding import TIME_MS_MAX
from tenure.core.errors import Conflict, ReplyLost, StoreUnreachable, UsageError
from tenure.core.job import Missed, NewJob, Schedule, Submitted, check_job, template_of
from tenure.core.seam import Records

GROUP = "schedules"
EVERY_S_MIN = 0.1
EVERY_S_MAX = 100 * 366 * 86_400
STORED_BYTES_MAX = 4 << 20
"""Of all schedules of a queue together: every round of upkeep reads them."""
ROUND_JOBS_MAX = 10_000
ROUND_BYTES_MAX = 16 << 20
"""A round stores no more jobs and bytes than this: times that pile up must not fill the memory."""
LATE_MS = 60_000
"""With `missed="skip"`, a time that passed longer ago than this makes no job."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_TIMES_MAX = 1_000
_ERROR_CHARS_MAX = 2_000
_MANY = 500  # so many schedules are decoded in a thread, to keep the event loop free
_TRIES_MAX = 20
# A worker that slept so long between reading and submitting starts over: the job of a time may have
# run and been removed since.
_STALE_S = 10.0
_Submit = Callable[[Sequence[NewJob]], Awaitable[Sequence[Submitted]]]
_STATE = {"next_ms": 0, "last_ms": 0, "last_id": "", "error": ""}


def new_schedule(
    job: NewJob,
    *,
    name: str = "",
    cron: str = "",
    every_s: float | timedelta | None = None,
    tz: str = "",
    missed: Missed = "one",
    declared: bool = False,
) -> Schedule:
    """A schedule that makes such jobs; raises `UsageError` for one that cannot work."""
    check_job(job)
    name = name or re.sub(r"[^A-Za-z0-9_.-]", "-", job.task)[:100]
    if not _NAME.fullmatch(name):
        raise UsageError(f"schedule {name[:120]!r}: 1 to 100 of letters, digits and _ . -")
    if bool(cron) == (every_s is not None):
        raise UsageError(f"schedule {name!r}: give either cron='0 3 * * *' or every_s=60")
    if missed not in get_args(Missed):
        raise UsageError(f"schedule {name!r}: missed is skip, one or all, not {missed!r}")
    if every_s is not None:
        seconds = every_s.total_seconds() if isinstance(every_s, timedelta) else every_s
        is_number = isinstance(seconds, int | float)
        if not is_number or not EVERY_S_MIN <= seconds <= EVERY_S_MAX:
            raise UsageError(
                f"schedule {name!r}: every_s is from {EVERY_S_MIN} to {EVERY_S_MAX:,} seconds, "
                f"not {every_s!r}"
            )
        if tz:
            raise UsageError(f"schedule {name!r}: only cron has a time zone; leave tz out")
    schedule = Schedule(
        name=name,
        template=template_of(job),
        cron=cron,
        every_ms=0 if every_s is None else round(seconds * 1000),
        tz=tz or "UTC",
        missed=missed,
        declared=declared,
    )
    if not next_time(schedule, time.time_ns() // 1_000_000):
        raise UsageError(f"schedule {name!r}: cron pattern {cron!r} has no time in the next years")
    return schedule


def next_time(schedule: Schedule, after_ms: int) -> int:
    """The first time of a schedule after this one, 0 if there is none.

    >>> from tenure.core.job import JobTemplate
    >>> report = Schedule(name="r", template=JobTemplate(task="r"), cron="0 3 * * *")
    >>> next_time(report, 1794790393461) - 1794790393461 < 86_400_000
    True
    """
    return _nearest(schedule, after_ms, reverse=False)


def last_time(schedule: Schedule, upto_ms: int) -> int:
    """The last time of a schedule up to this one, 0 if there is none."""
    return _nearest(schedule, upto_ms + 1, reverse=True)


def _nearest(schedule: Schedule, from_ms: int, *, reverse: bool) -> int:
    if schedule.every_ms:  # on a grid from 1970, so that all workers see the same times
        every_ms = schedule.every_ms
        return ((from_ms - 1) // every_ms if reverse else from_ms // every_ms + 1) * every_ms
    from zoneinfo import ZoneInfo  # not above: commands that only look start faster

    from cronsim import CronSim, CronSimError

    try:
        zone = ZoneInfo(schedule.tz) if schedule.tz != "UTC" else UTC
        start = datetime.fromtimestamp(from_ms / 1000, zone)
        for moment in CronSim(schedule.cron, start, reverse=reverse):
            found_ms = round(moment.timestamp() * 1000)
            # In the hour that a clock change repeats, or moves, it may return an earlier time.
            if found_ms < from_ms if reverse else found_ms > from_ms:
                return found_ms
    except CronSimError as error:
        raise UsageError(
            f"schedule {schedule.name!r}: cron pattern {schedule.cron!r}: {error}; five fields, "
            "such as '0 3 * * *', or six with seconds first"
        ) from None
    except (KeyError, OSError, ValueError):  # what zoneinfo raises
        raise UsageError(
            f"schedule {schedule.name!r}: no time zone {schedule.tz!r}; write one such as "
            "Europe/Berlin"
        ) from None
    return 0


def due_times(
    schedule: Schedule, now_ms: int, ahead_ms: int, most: int = _TIMES_MAX
) -> tuple[list[int], int]:
    """The times that need a job now or within `ahead_ms`, and the next one after them."""
    times: list[int] = []
    next_ms = schedule.next_ms
    if schedule.missed != "all" and 0 < next_ms <= now_ms:
        last_ms = max(next_ms, last_time(schedule, now_ms))
        if schedule.missed == "one" or now_ms - last_ms <= LATE_MS:
            times.append(last_ms)
        next_ms = next_time(schedule, last_ms)
    while 0 < next_ms <= now_ms + ahead_ms and len(times) < most:
        times.append(next_ms)
        next_ms = next_time(schedule, next_ms)
    return times, next_ms


def occurrence_id(name: str, at_ms: int) -> str:
    """The id of the job of one time.

    >>> occurrence_id("report", 1794794400000)
    'report@1794794400000'
    """
    return f"{name}@{at_ms}"


class StoredSchedules:
    """The schedules of a queue whose contract has none of its own."""

    def __init__(self, records: Records) -> None:
        self._records = records

    async def put(self, schedule: Schedule) -> Schedule:
        """Store or change a schedule. A change of its times counts from now."""
        for _ in range(_TRIES_MAX):
            now_ms, found = await self._records.read(GROUP)
            before = found.get(schedule.name, "")
            kept = _read(schedule.name, before)
            if kept is not None and _definition(kept) == _definition(schedule):
                return kept
            after = msgspec.structs.replace(schedule, next_ms=next_time(schedule, now_ms))
            if kept is not None:
                is_timed_alike = _timing(kept) == _timing(schedule)
                next_ms = kept.next_ms if is_timed_alike else after.next_ms
                after = msgspec.structs.replace(
                    after, next_ms=next_ms, last_ms=kept.last_ms, last_id=kept.last_id
                )
            written = _written(after)
            size = sum(map(len, found.values())) - len(before) + len(written)
            if size > STORED_BYTES_MAX and len(written) > len(before):
                raise UsageError(
                    f"schedule {schedule.name!r}: the schedules of a queue have {STORED_BYTES_MAX} "
                    "characters together; remove one, or store a reference in the payload"
                )
            if await self._records.swap(GROUP, schedule.name, before, written):
                return after
        raise Conflict(f"schedule {schedule.name!r} is being changed by others; try again")

    async def list(self) -> Sequence[Schedule]:
        """All schedules, the next one due first."""
        _, found = await self._records.read(GROUP)
        read = [schedule for _, schedule in await _read_all(found)]
        return sorted(read, key=lambda schedule: (schedule.next_ms or 2**63, schedule.name))

    async def remove(self, name: str) -> bool:
        """Remove a schedule; False if there is none."""
        for _ in range(_TRIES_MAX):
            before = await self._records.get(GROUP, name)
            if not before:
                return False
            if await self._records.swap(GROUP, name, before, ""):
                return True
        raise Conflict(f"schedule {name!r} is being changed by others; try again")

    async def enqueue_due(self, submit: _Submit, ahead_ms: int) -> Sequence[Schedule]:
        """Submit the jobs of the times that are due, then move their schedules on.

        A schedule whose jobs the queue cannot take does not hold up the others. Its error is raised
        when they are done.
        """
        began = time.monotonic()
        now_ms, found = await self._records.read(GROUP)
        until_ms = now_ms + ahead_ms
        waiting = [each for each in await _read_all(found) if 0 < each[1].next_ms <= until_ms]
        random.shuffle(waiting)  # one that a full round leaves out is not left out for ever
        due = await asyncio.to_thread(_due_jobs, waiting, now_ms, ahead_ms) if waiting else []
        round_ = _Round(self._records, submit, began)
        await round_.store(due)
        if round_.failed:
            raise round_.failed[0]
        return round_.moved


class _Due(NamedTuple):
    """A schedule as it was stored, as it is when its due jobs are stored, and those jobs."""

    before: str
    schedule: Schedule
    jobs: list[NewJob]


class _Round:
    """Stores due jobs, and moves their schedules on."""

    def __init__(self, records: Records, submit: _Submit, began: float) -> None:
        self._records = records
        self._submit = submit
        self._began = began
        self.moved: list[Schedule] = []
        self.failed: list[Exception] = []

    async def store(self, portion: Sequence[_Due]) -> None:
        """Store these; a schedule whose jobs the queue cannot take is found by halves."""
        if not portion or time.monotonic() - self._began > _STALE_S:
            return
        jobs = [job for due in portion for job in due.jobs]
        try:
            answers = iter(await self._submit(jobs) if jobs else ())
        except (StoreUnreachable, ReplyLost):
            raise
        except Exception as error:  # by a job that no check foresaw
            if len(portion) == 1:
                self.failed.append(error)
                return
            half = len(portion) // 2
            await self.store(portion[:half])
            await self.store(portion[half:])
            return
        for before, schedule, each in portion:
            after = _after(schedule, [next(answers) for _ in each])
            if after is None or _written(after) == before:
                continue
            if await self._records.swap(GROUP, after.name, before, _written(after)):
                self.moved.append(after)


def _text_of(error: Exception) -> str:
    text = str(error) if isinstance(error, UsageError) else repr(error)
    return text[:_ERROR_CHARS_MAX]


def _due_jobs(waiting: Sequence[tuple[str, Schedule]], now_ms: int, ahead_ms: int) -> list[_Due]:
    """For due schedules their text, what they are when their jobs are stored, and those jobs.

    It ends where a round is full. The rest is still due in the next round.
    """
    due: list[_Due] = []
    jobs_left, bytes_left = ROUND_JOBS_MAX, ROUND_BYTES_MAX
    for before, schedule in waiting:
        if jobs_left <= 0 or bytes_left <= 0:
            break
        size = max(1, len(schedule.template.payload))
        most = min(_TIMES_MAX, jobs_left, max(1, bytes_left // size))
        try:
            moved, jobs = _jobs(schedule, now_ms, ahead_ms, most)
        except Exception as error:  # such as a time zone that this machine lacks
            moved, jobs = msgspec.structs.replace(schedule, error=_text_of(error)), []
        due.append(_Due(before, moved, jobs))
        jobs_left -= len(jobs)
        bytes_left -= size * len(jobs)
    return due


def _jobs(
    schedule: Schedule, now_ms: int, ahead_ms: int, most: int
) -> tuple[Schedule, list[NewJob]]:
    """The schedule as it is when its due jobs are stored, and those jobs, so many at most."""
    times, next_ms = due_times(schedule, now_ms, ahead_ms, most)
    jobs = [
        schedule.template.job(occurrence_id(schedule.name, at_ms), delay_ms=max(0, at_ms - now_ms))
        for at_ms in times
    ]
    last = {"last_ms": times[-1], "last_id": jobs[-1].job_id} if times else {}
    return msgspec.structs.replace(schedule, next_ms=next_ms, error="", **last), jobs


def _after(schedule: Schedule, answers: Sequence[Submitted]) -> Schedule | None:
    """The schedule after the answers to its jobs; None if it cannot move on yet.

    Another worker may have stored a job with another delay: that is no conflict here.
    """
    if any(answer.status == "full" for answer in answers):
        return None
    refused = [answer.reason for answer in answers if answer.status == "invalid"]
    return msgspec.structs.replace(schedule, error=refused[-1]) if refused else schedule


def _definition(schedule: Schedule) -> Schedule:
    """What the user said, without what the store added."""
    return msgspec.structs.replace(schedule, **_STATE)


def _timing(schedule: Schedule) -> tuple[str, int, str]:
    return schedule.cron, schedule.every_ms, schedule.tz


def _written(schedule: Schedule) -> str:
    return msgspec.json.encode(schedule).decode()


async def _read_all(found: Mapping[str, str]) -> list[tuple[str, Schedule]]:
    """The records that are schedules, each with its text."""
    items = list(found.items())
    return await asyncio.to_thread(_readable, items) if len(items) > _MANY else _readable(items)


def _readable(items: Iterable[tuple[str, str]]) -> list[tuple[str, Schedule]]:
    return [(each[1], schedule) for each in items if (schedule := _read(*each)) is not None]


def _read(name: str, text: str) -> Schedule | None:
    """A stored schedule; None for none, and for one that another version or program wrote."""
    try:
        schedule = msgspec.json.decode(text, type=Schedule) if text else None
    except (msgspec.MsgspecError, RecursionError):
        return None
    if schedule is None or schedule.name != name:
        return None
    times = (schedule.next_ms, schedule.last_ms, schedule.every_ms)
    return schedule if all(0 <= each <= TIME_MS_MAX for each in times) else None
