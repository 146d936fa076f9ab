"""A submitted job in the caller's hand."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any, Generic, Literal, TypeVar, cast

import msgspec

from tenure.client.connection import Connection
from tenure.client.follow import EventFollower
from tenure.client.records import Event, JobError, JobInfo, job_error, job_event, job_info
from tenure.core.convert import explain, result_decoder
from tenure.core.errors import (
    Conflict,
    InvalidResult,
    JobCancelled,
    JobFailed,
    NotFound,
    Timeout,
)
from tenure.core.job import JobRecord
from tenure.core.portable import end_of, state_of
from tenure.plans.flow import step_of

R = TypeVar("R")

_BEFORE = "waiting"  # of a step that is not stored yet, so that the contract has no word for it
# BullMQ fails a parent with its child, for "child bull:films:import-17@0.0 failed".
_CHILD = "child"
_CHILD_ID = re.compile(r"child \S*:(\S+) failed")


class Handle(Generic[R]):
    """A job by its id: await its result, follow its events, cancel or retry it.

    `replayed` says that the submit stored nothing, because the job was there already. Handles cost
    nothing while no caller awaits them, and any number of them waits on one connection.
    """

    __slots__ = ("_connection", "_result_type", "id", "replayed", "task")

    def __init__(
        self,
        connection: Connection,
        job_id: str,
        *,
        task: str = "",
        result_type: Any = Any,
        replayed: bool = False,
    ) -> None:
        self._connection = connection
        self._result_type = result_type
        self.id = job_id
        self.task = task
        self.replayed = replayed

    def __repr__(self) -> str:
        return f"Handle({self.task!r}, id={self.id!r})"

    def on(self, connection: Connection) -> Handle[R]:
        """The same handle over another connection."""
        return Handle(
            connection,
            self.id,
            task=self.task,
            result_type=self._result_type,
            replayed=self.replayed,
        )

    async def result(self, *, timeout_s: float | None = None) -> R:
        """What the handler returned, as the type that the task declares.

        Raises `JobFailed`, with the worker's traceback where the contract keeps it, `JobCancelled`,
        `Timeout` (the job goes on), `NotFound` if the job is gone, and `InvalidResult` if the
        result is not of that type.
        """
        record = await self._cause(await self._end(timeout_s))
        match state_of(record):
            case "failed":
                raise await self._failure(record)
            case "cancelled":
                reason = job_error(record.error).message
                raise JobCancelled(
                    f"job {record.job_id} was cancelled" + (f": {reason}" if reason else ""),
                    job_id=record.job_id,
                    contract=record.contract,
                )
        try:
            return cast("R", result_decoder(self._result_type)(record.result or b"null"))
        except msgspec.MsgspecError as error:
            raise InvalidResult(
                f"the result of job {self.id} is not what task {record.task!r} declares: "
                f"{explain(error)}",
                contract=record.contract,
                operation="result",
            ) from None

    async def wait(self, *, timeout_s: float | None = None) -> JobInfo:
        """The job as it is when it has ended, however it did; raises `Timeout` and `NotFound`."""
        return job_info(await self._end(timeout_s))

    async def status(self) -> JobInfo:
        """The job as it is now; raises `NotFound` if it is gone.

        A job of a chain that waits for others is waiting, also where it is not stored yet.
        """
        record = await self._connection.ledger.get(self.id)
        if record is None:
            if not await self._steps_before():
                raise self._gone()
            record = JobRecord(
                job_id=self.id,
                contract=self._connection.contract,
                queue=self._connection.name,
                task=self.task,
                state=_BEFORE,
            )
        return job_info(record)

    async def events(self, *, after: str = "") -> AsyncIterator[Event]:
        """The job's events from the first, or after the id of one, until the event of its end.

        A reader that is slow misses none: it gets them from the store. A job of a chain that is not
        stored yet is waited for; raises the error of the job before it that fails.
        """
        connection = self._connection
        if await connection.ledger.get(self.id) is None and not await self._results_before():
            raise self._gone()
        feed = connection.feed
        follower = feed.follow(EventFollower(feed, self.id, after))
        try:
            while (event := await follower.next()) is not None:
                yield job_event(connection.contract, event)
        finally:
            feed.leave(follower)

    async def cancel(self) -> Literal["ended", "requested"]:
        """End the job: "ended" if it waited, "requested" if its worker is now told to stop.

        Raises `Conflict` if it has ended already, `NotFound` if it is gone. Of a chain or gather
        that is not so far yet, the jobs are cancelled that it waits for.
        """
        (answer,) = await self._connection.ledger.cancel([self.id])
        if answer == "requested":
            return "requested"
        refusal = None if answer == "ok" else await self._refused("cancelled", answer)
        is_ahead = refusal is None or isinstance(refusal, NotFound)
        steps = await self._steps_before() if is_ahead else []
        answers = await asyncio.gather(*(step.cancel() for step in steps), return_exceptions=True)
        if refusal is not None and not {"ended", "requested"} & set(answers):
            raise refusal
        return "requested" if "requested" in answers else "ended"

    async def retry(self) -> None:
        """Send a job back that has ended, with all its attempts.

        Raises `Conflict` if it has not ended or its contract does not send such a job back, and
        `NotFound` if it is gone.
        """
        (answer,) = await self._connection.ledger.retry([self.id])
        if answer != "ok":
            raise await self._refused("sent back", answer)

    async def _end(self, timeout_s: float | None) -> JobRecord:
        try:
            async with asyncio.timeout(timeout_s):
                record = await self._connection.feed.end_of(self.id)
                if record is None and await self._results_before():
                    record = await self._connection.feed.end_of(self.id)
                return record if record is not None else await self._remembered()
        except TimeoutError:
            raise Timeout(
                f"job {self.id} had not ended after {timeout_s:g} s; it goes on",
                contract=self._connection.contract,
                operation="result",
            ) from None

    async def _steps_before(self) -> list[Handle[Any]]:
        """The steps of a chain or gather that this one, which has not begun, waits for."""
        flows = self._connection.queue.features.flows
        if step_of(self.id) is None or flows is None:
            return []
        return [Handle(self._connection, job_id) for job_id in await flows.before(self.id)]

    async def _results_before(self) -> bool:
        """Wait for those steps; False if there are none.

        This step is stored before the last of them is done. Raises the error of one that failed:
        then this one does not run. Stages are awaited one after another, from the one that runs:
        a task for each stage, inside the one after it, could not be cancelled in a long chain.
        """
        stages = [await self._steps_before()]
        while stages[-1] and await self._connection.ledger.get(stages[-1][0].id) is None:
            stages.append(await stages[-1][0]._steps_before())
        for stage in reversed(stages):
            steps = [asyncio.ensure_future(step.result()) for step in stage]
            try:
                await asyncio.gather(*steps)
            finally:
                for step in steps:
                    step.cancel()
        return bool(stages[0])

    async def _remembered(self) -> JobRecord:
        """The end of a job whose record is gone, if the contract keeps its last event."""
        contract = self._connection.contract
        events = await self._connection.ledger.events(self.id)
        if not events or end_of(contract, events[-1].type) is None:
            raise self._gone()
        last = events[-1]
        said = msgspec.json.decode(last.data, type=dict[str, msgspec.Raw])
        reason = msgspec.json.decode(said["failedReason"]) if "failedReason" in said else ""
        return JobRecord(
            job_id=self.id,
            contract=contract,
            queue=self._connection.name,
            task=self.task,
            state=last.type,
            result=bytes(said.get("result", b"null")),
            error=msgspec.json.encode({"message": reason}),
            updated_ms=last.ts_ms,
        )

    async def _cause(self, record: JobRecord) -> JobRecord:
        """The job itself, or the step before it with which it failed, or the one before that."""
        while record.error and (error := job_error(record.error)).code == _CHILD:
            named = _CHILD_ID.search(error.message)
            step = step_of(named[1]) if named else None
            child = await self._connection.ledger.get(step.id) if step else None
            if child is None or state_of(child) not in ("failed", "cancelled"):
                break
            record = child
        return record

    async def _failure(self, record: JobRecord) -> JobFailed:
        error = job_error(record.error)
        traceback = error.traceback or await self._kept_traceback(record.job_id)
        said = f"{error.code}: {error.message}" if error.code else error.message
        return JobFailed(
            f"job {record.job_id} ({record.task}) failed: {said or 'no reason was stored'}",
            job_id=record.job_id,
            error_code=error.code,
            traceback=traceback,
            attempts=record.attempt,
            contract=record.contract,
        )

    async def _kept_traceback(self, job_id: str) -> str:
        """The traceback of the last attempt, in contracts that keep it with their attempts."""
        attempts = getattr(self._connection.ledger, "attempts", None)
        if attempts is None:
            return ""
        for attempt in reversed(await attempts(job_id)):
            kept = attempt.get("error") or b""
            raw = kept.encode() if isinstance(kept, str) else kept
            error = job_error(raw) if raw else JobError()
            if error.traceback:
                return error.traceback
        return ""

    async def _refused(self, done: str, answer: str) -> Conflict | NotFound:
        record = await self._connection.ledger.get(self.id)
        if record is None:
            return self._gone()
        return Conflict(
            f"job {self.id} is {state_of(record)} and cannot be {done} ({answer})",
            contract=record.contract,
        )

    def _gone(self) -> NotFound:
        return NotFound(
            f"there is no job {self.id} (any more); the queue keeps ended jobs for a while only",
            contract=self._connection.contract,
        )
