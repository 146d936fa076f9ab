"""Jobs that do not come from a submit of a client: scheduled ones, and those that jobs lead to.

Every worker stores the jobs of schedules that are due. A handler submits further jobs, and a
completed job of a chain leads to the next one: both are submitted before the job itself is settled,
under ids that follow from it. If the worker dies in between, the job runs again and submits the
same jobs, which the queue has already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import structlog

from tenure.core.endpoint import check_stored
from tenure.core.errors import LeaseLost, ReplyLost, StoreUnreachable, UsageError
from tenure.core.outcome import Outcome
from tenure.core.portable import new_job
from tenure.core.seam import Schedules
from tenure.plans import flow
from tenure.worker.claim import Context, Source
from tenure.worker.job import AskVerb, Attempt, NewCall
from tenure.worker.task import Tasks

T = TypeVar("T")

log = structlog.get_logger("tenure.worker")


async def ask(attempt: Attempt, verb: AskVerb, argument: bytes) -> Any:
    """What a running job asks of its queue."""
    source: Source = attempt.source
    if verb == "submit":
        return await _submit(attempt, source, argument)
    if source.features.flows is None:
        raise UsageError(f"jobs of {source.name} wait for no others, so they have no children")
    return await source.features.flows.children(attempt.lease)


async def _submit(attempt: Attempt, source: Source, argument: bytes) -> str:
    """Submit the job that a handler asked for; its id."""
    call = msgspec.json.decode(argument, type=NewCall)
    made = new_job(source.features.contract, call.task, call.payload.encode(), call.options)
    job = msgspec.structs.replace(made, trace=attempt.lease.trace)
    (answer,) = await _until_answered(attempt, "submit", lambda: source.queue.submit([job]))
    check_stored(answer)
    return answer.job_id


async def continued(attempt: Attempt, outcome: Outcome) -> Outcome:
    """The outcome of a completed job, after the jobs that waited for it are stored."""
    flows = attempt.source.features.flows
    if flows is None:
        return outcome
    return await _until_answered(attempt, "flows", lambda: flow.continued(flows, outcome))


async def _until_answered(attempt: Attempt, operation: str, call: Callable[[], Awaitable[T]]) -> T:
    """Make a call that may be sent again, until the store answers or the lease is lost."""
    source: Source = attempt.source
    backoff = source.backoff()
    while not (attempt.lost or attempt.outcome_chosen):
        try:
            answer = await call()
        except (StoreUnreachable, ReplyLost) as error:
            source.failed(operation, error)
            await asyncio.sleep(backoff.pause_s())
        else:
            source.answered(operation)
            return answer
    raise LeaseLost(attempt.lease.job_id, "this attempt is over")


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
            source.answered("schedules")
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
