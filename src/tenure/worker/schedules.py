"""The schedules of a served queue: store what the tasks declare, and the jobs that are due."""

from __future__ import annotations

import asyncio

import structlog

from tenure.core.errors import UsageError
from tenure.core.seam import Schedules
from tenure.worker.claim import Context, Source
from tenure.worker.task import Tasks

log = structlog.get_logger("tenure.worker")


async def keep_schedules(source: Source, context: Context, tasks: Tasks | None) -> None:
    """Store due jobs in rounds, as upkeep goes; first the schedules that `tasks` declare, if any.

    Each round looks two rounds ahead, so that a job is stored before its time. A declared schedule
    that the queue refuses stops the worker.
    """
    schedules = source.features.schedules
    declared = tasks.schedules if tasks is not None else []
    if schedules is None:
        for schedule in declared:
            log.error(
                "this queue cannot store schedules; the task is not scheduled",
                task=schedule.template.task,
                queue=source.name,
            )
        return
    round_ms = context.settings.upkeep_ms
    is_declared = tasks is None
    while True:
        try:
            if tasks is not None and not is_declared:
                await _declare(schedules, tasks)
                is_declared = True
            await _enqueue_due(source, schedules, 2 * round_ms)
        except UsageError:
            raise
        except Exception as error:
            source.contact.failed("schedules", error)
        else:
            source.contact.made("schedules")
        context.watch.tell("schedules")
        await asyncio.sleep(round_ms / 1000 * (0.75 + context.rng.random() / 2))


async def _declare(schedules: Schedules, tasks: Tasks) -> None:
    """Store the declared schedules; remove those of our tasks that are declared no more."""
    declared = {schedule.name: schedule for schedule in tasks.schedules}
    for schedule in declared.values():
        await schedules.put(schedule)
    names = {task.name for task in tasks}
    for stored in await schedules.list():
        if stored.declared and stored.name not in declared and stored.template.task in names:
            await schedules.remove(stored.name)


async def _enqueue_due(source: Source, schedules: Schedules, ahead_ms: int) -> None:
    for schedule in await schedules.enqueue_due(source.queue.submit, ahead_ms):
        if schedule.error:
            log.error(
                "the queue refuses the job of a schedule",
                schedule=schedule.name,
                task=schedule.template.task,
                queue=source.name,
                reason=schedule.error,
            )
