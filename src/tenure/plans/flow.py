"""Chained jobs over the records of a queue: a stage of jobs runs when the stage before is done.

A chain of three is three stages of one job, and a gather is a stage of many and a stage of one.
The jobs are called steps; their ids say where they stand: `import-17@1.0` is the first step of the
second stage. The steps of the first stage are submitted at once, the others are stored in a record.

A worker that has completed a step first stores its result beside the queue, then submits the next
stage if that result was the last one missing, and settles the step only after that. If it dies in
between, the step runs again and does the same: the result is there already, and the next steps are
submitted under the same ids. When all steps of a stage are done, the next stage is stored already.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from tenure.core.encoding import shown_json
from tenure.core.errors import Conflict, UsageError
from tenure.core.job import (
    FULL_RETRY_MS,
    Children,
    JobTemplate,
    NewJob,
    Submitted,
    request_hash,
    template_of,
)
from tenure.core.lease import Lease
from tenure.core.outcome import Failure, Outcome
from tenure.core.seam import Flows, Records

KEEP_MS = 30 * 86_400_000
"""How long results are kept after the last one, in case a failed step is retried."""
ENDED_KEEP_MS = 3_600_000
"""How long they are kept once the last step is done: it may lose its lease and run again."""

_STEPS_MAX = 1_000_000  # of a stage: their numbers have six digits

_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
_FLOW_ID = re.compile(r"[A-Za-z0-9_.-]{1,90}")
_STEP = re.compile(r"([A-Za-z0-9_.-]{1,90})@([0-9]{1,5})\.([0-9]{1,6})")

Submit = Callable[[Sequence[NewJob]], Awaitable[Sequence[Submitted]]]


class Step(NamedTuple):
    """A job of a flow: its stage and its number there, both from 0."""

    flow: str
    stage: int
    number: int

    @property
    def id(self) -> str:
        """The id of the job."""
        return f"{self.flow}@{self.stage}.{self.number}"

    @property
    def group(self) -> str:
        """The records of the results of its stage."""
        return f"flow:{self.flow}:{self.stage}"


class _Stage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The steps of a stage, and how many results it needs of the stage before.

    `flow` is a hash of all steps of the flow: two flows with the same stage differ in it.
    """

    needs: int
    jobs: list[JobTemplate]
    flow: str = ""


def step_of(job_id: str) -> Step | None:
    """The step that an id names, None for any other job.

    >>> step_of("import-17@1.0"), step_of("report@1794794400000")
    (Step(flow='import-17', stage=1, number=0), None)
    """
    found = _STEP.fullmatch(job_id)
    return Step(found[1], int(found[2]), int(found[3])) if found else None


def stage_before(job_id: str) -> Step | None:
    """The first step of the stage whose results a job gets; None for a job that gets none."""
    step = step_of(job_id)
    return Step(step.flow, step.stage - 1, 0) if step is not None and step.stage else None


def steps_of(flow_id: str, stages: Sequence[Sequence[NewJob]]) -> list[list[NewJob]]:
    """The jobs under the ids of their steps; raises `UsageError` for an invalid flow."""
    if not _FLOW_ID.fullmatch(flow_id):
        raise UsageError(f"id {flow_id[:120]!r} of a chain: 1 to 90 of letters, digits and _ . -")
    if not stages or not all(stages):
        raise UsageError("a chain or gather needs at least one job to begin with")
    return [
        [
            template_of(job).job(Step(flow_id, at, number).id, delay_ms=job.delay_ms)
            for number, job in enumerate(jobs)
        ]
        for at, jobs in enumerate(stages)
    ]


def another_flow(flow_id: str) -> Conflict:
    """The error of a second flow under the id of a first."""
    return Conflict(f"another chain or gather was already started under id {flow_id!r}")


async def continued(flows: Flows, outcome: Outcome) -> Outcome:
    """The outcome of a completed job, after the jobs that waited for it are stored.

    If the queue is full, the job is handed back to run again later: its own place in the queue may
    be the one that is missing. If the queue refuses the next job, this one fails.
    """
    lease = outcome.lease
    try:
        answers = await flows.finished(lease.job_id, outcome.result)
    except UsageError as error:
        failure = Failure(code="next_unreadable", message=str(error), retryable=False)
        return Outcome(lease, "bury", failure=failure)
    refused = [answer.reason for answer in answers if answer.status == "invalid"]
    if refused:
        why = f"the queue refuses the next job of the chain: {refused[0]}"
        failure = Failure(code="next_refused", message=why, retryable=False)
        return Outcome(lease, "bury", failure=failure)
    if any(answer.status == "full" for answer in answers):
        return Outcome(lease, "snooze", delay_ms=FULL_RETRY_MS)
    return outcome


class StoredFlows:
    """The flows of a queue whose contract has none of its own."""

    def __init__(self, records: Records, submit: Submit) -> None:
        self._records = records
        self._submit = submit

    async def start(self, flow_id: str, stages: Sequence[Sequence[NewJob]]) -> list[Submitted]:
        """Store the later stages, then submit the first; the answers to its jobs.

        Repeating it is harmless. Raises `Conflict` if the id belongs to another flow.
        """
        first, *later = steps_of(flow_id, stages)
        whole = request_hash([[template_of(job) for job in jobs] for jobs in stages])
        for at, jobs in enumerate(later, start=1):
            stage = _Stage(len(stages[at - 1]), [template_of(job) for job in jobs], whole)
            text = msgspec.json.encode(stage).decode()
            if not await self._records.swap(f"flow:{flow_id}", str(at), "", text, keep_ms=KEEP_MS):
                raise another_flow(flow_id)
        return list(await self._submit(first))

    async def finished(self, job_id: str, result: bytes) -> list[Submitted]:
        """Note that a step is completed; the answers to the next steps, if it was the last one.

        The first result that is noted for a step counts.
        """
        step = step_of(job_id)
        if step is None:
            return []
        following = await self._stage(step.flow, step.stage + 1)
        if following is None:
            await self._expire(step)
            return []
        text = result.decode(errors="replace") or "null"
        await self._records.swap(step.group, str(step.number), "", text, keep_ms=KEEP_MS)
        if await self._records.size(step.group) < following.needs:
            return []
        at = step.stage + 1
        jobs = [
            template.job(Step(step.flow, at, number).id)
            for number, template in enumerate(following.jobs)
        ]
        return list(await self._submit(jobs))

    async def before(self, job_id: str) -> list[str]:
        """The steps that a step of a later stage waits for; [] for any other job."""
        step = step_of(job_id)
        stage = await self._stage(step.flow, step.stage) if step is not None else None
        if step is None or stage is None or step.number >= len(stage.jobs):
            return []
        return [Step(step.flow, step.stage - 1, number).id for number in range(stage.needs)]

    async def children(self, lease: Lease) -> Children:
        """The results of the stage before a step, in the order of its steps."""
        results = await self.results(lease)
        return Children(results={name: shown_json(text.encode()) for name, text in results.items()})

    async def results(self, lease: Lease) -> dict[str, str]:
        """The same as JSON texts."""
        stage = stage_before(lease.job_id)
        if stage is None:
            return {}
        _, found = await self._records.read(stage.group)
        numbers = sorted(int(number) for number in found if _NUMBER.fullmatch(number))
        return {stage._replace(number=number).id: found[str(number)] for number in numbers}

    async def _stage(self, flow_id: str, at: int) -> _Stage | None:
        stage: _Stage | None
        text = await self._records.get(f"flow:{flow_id}", str(at))
        if not text:
            return None
        try:
            stage = msgspec.json.decode(text, type=_Stage)
        except (msgspec.MsgspecError, RecursionError):
            stage = None
        if stage is None or not 0 < stage.needs <= _STEPS_MAX:
            raise UsageError(
                f"stage {at} of the chain {flow_id!r} cannot be read: another program wrote it"
            )
        return stage

    async def _expire(self, last: Step) -> None:
        """The last step is done, so the results are not needed any more."""
        # An id can name a stage that was never stored; the records say how many there are.
        stages = min(last.stage, await self._records.size(f"flow:{last.flow}")) if last.stage else 0
        groups = [f"flow:{last.flow}:{at}" for at in range(stages)]
        for group in (f"flow:{last.flow}", *groups) if stages else ():
            await self._records.expire(group, ENDED_KEEP_MS)
