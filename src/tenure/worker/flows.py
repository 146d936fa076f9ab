"""Jobs that a running job leads to: those that its handler submits, and the next steps of a chain.

Both are submitted before the job itself is settled, under ids that follow from it. If the worker
dies in between, the job runs again and submits the same jobs, which the queue has already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from tenure.core.endpoint import check_stored
from tenure.core.errors import LeaseLost, ReplyLost, StoreUnreachable
from tenure.core.outcome import Outcome
from tenure.core.portable import new_job
from tenure.plans import flow
from tenure.worker.job import Attempt, NewCall

T = TypeVar("T")


async def submit_call(attempt: Attempt, argument: bytes) -> str:
    """Submit the job that a handler asked for; its id."""
    source = attempt.source
    call = msgspec.json.decode(argument, type=NewCall)
    made = new_job(source.features.contract, call.task, call.payload.encode(), call.options)
    job = msgspec.structs.replace(made, trace=attempt.lease.trace)
    (answer,) = await _until_answered(attempt, "submit", lambda: source.queue.submit([job]))
    check_stored(answer)
    return str(answer.job_id)


async def continued(attempt: Attempt, outcome: Outcome) -> Outcome:
    """The outcome of a completed job, after the jobs that waited for it are stored."""
    flows = attempt.source.features.flows
    if flows is None:
        return outcome
    return await _until_answered(attempt, "flows", lambda: flow.continued(flows, outcome))


async def _until_answered(attempt: Attempt, operation: str, call: Callable[[], Awaitable[T]]) -> T:
    """Make a call that may be sent again, until the store answers or the lease is lost."""
    source: Any = attempt.source
    backoff = source.backoff()
    while not (attempt.lost or attempt.concluded):
        try:
            answer = await call()
        except (StoreUnreachable, ReplyLost) as error:
            source.failed(operation, error)
            await asyncio.sleep(backoff.pause_s())
        else:
            source.contact.made(operation)
            return answer
    raise LeaseLost(attempt.lease.job_id, "this attempt is over")
