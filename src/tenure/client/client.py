"""The client: submit jobs to one queue of any contract, and look after them.

async with Client("streams+redis://127.0.0.1:6379/0") as client:
    handle = await client.submit(greet, name="Ada")
    greeting = await handle.result(timeout_s=30)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar, overload

from tenure.client.connection import Connection, named_call
from tenure.client.handle import Handle
from tenure.client.records import (
    JobInfo,
    JobPage,
    QueueCounts,
    ScheduleInfo,
    job_info,
    queue_counts,
    schedule_info,
)
from tenure.core.config import queue_url
from tenure.core.endpoint import check_stored
from tenure.core.errors import TenureError, UsageError
from tenure.core.job import Missed, NewJob, Submitted, new_job_id
from tenure.core.portable import (
    STATES,
    State,
    SubmitOptions,
    is_in,
    job_of_call,
    known_words,
    own_words,
)
from tenure.core.seam import Query
from tenure.plans.flow import Step
from tenure.store.resend import resend

if TYPE_CHECKING:
    from typing import Unpack

    from tenure.worker.task import Call, Task

P = ParamSpec("P")
R = TypeVar("R")

Named: TypeAlias = tuple[str, Any] | tuple[str, Any, SubmitOptions]
"""A task that lives elsewhere, by its name, with its payload and perhaps options."""


class Client:
    """Submits jobs to one queue and awaits them, for one event loop.

    A queue is a URL, or its name in tenure.toml. The client connects on first use. All handles that
    wait share one connection, which reads the queue's news. A client that was closed is open again
    inside a further `async with`, also in another event loop. `tenure.sync.Client` is the same for
    programs without an event loop.
    """

    def __init__(self, queue: str) -> None:
        self._connection = Connection(queue)

    @classmethod
    def from_env(cls) -> Client:
        """A client of the configured queue, the one that commands use.

        It is `TENURE_QUEUE_URL`, else `queue_url` in tenure.toml, else that of a running
        `tenure up`, else a Redis on this machine.
        """
        return cls(queue_url())

    async def __aenter__(self) -> Client:
        if self._connection.is_closed:
            self._connection = Connection(self._connection.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of connections; what still waits for a result gets an error."""
        await self._connection.close()

    @overload
    async def submit(self, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Handle[R]: ...
    @overload
    async def submit(
        self, task: Task[[], R], payload: Mapping[str, Any], /, **options: Unpack[SubmitOptions]
    ) -> Handle[R]: ...
    @overload
    async def submit(self, call: Call[R], /, **options: Unpack[SubmitOptions]) -> Handle[R]: ...
    @overload
    async def submit(
        self, task: str, payload: Any = ..., /, **options: Unpack[SubmitOptions]
    ) -> Handle[Any]: ...
    async def submit(self, what: Any, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Store one job; it is in the queue when this returns.

        A typed task takes its parameters: `submit(greet, name="Ada")`. Options go with a call:
        `submit(greet.call(name="Ada"), delay_s=60)`. A task that lives elsewhere goes by its name,
        with its payload: `submit("greet", {"name": "Ada"}, key="order-17")`; bytes are JSON.

        Raises `InvalidJob` for what the queue or the task cannot take, `Conflict` for an id or key
        of another request, `QueueFull` with the time to wait, `StoreUnreachable` if nothing was
        stored, and `ReplyLost` if that is not known.
        """
        job, result_type = self._new_job(what, args, kwargs)
        (answer,) = await self._connection.submit([job])
        check_stored(answer)
        return self._handle(job, result_type, answer)

    @overload
    async def submit_many(
        self, calls: Iterable[Call[R]], *, errors: Literal["raise"] = "raise"
    ) -> list[Handle[R]]: ...
    @overload
    async def submit_many(
        self, calls: Iterable[Call[R]], *, errors: Literal["return"]
    ) -> list[Handle[R] | TenureError]: ...
    @overload
    async def submit_many(
        self, calls: Iterable[Call[Any] | Named], *, errors: Literal["raise"] = "raise"
    ) -> list[Handle[Any]]: ...
    @overload
    async def submit_many(
        self, calls: Iterable[Call[Any] | Named], *, errors: Literal["return"]
    ) -> list[Handle[Any] | TenureError]: ...
    async def submit_many(
        self, calls: Iterable[Any], *, errors: Literal["raise", "return"] = "raise"
    ) -> Sequence[Any]:
        """Store many jobs in as few calls as the store allows; handles in the order of the calls.

        Calls are `greet.call(name="Ada")`, or `("greet", {"name": "Ada"})` by name. One job that is
        refused harms no other: the refusals are raised as one `ExceptionGroup`, each with a note
        that says which job it was, or returned in the places of their handles.
        """
        made = [self._made(call) for call in calls]
        jobs = [each[0] for each in made if not isinstance(each, TenureError)]
        answers = iter(await self._connection.submit(jobs))
        placed = [
            each if isinstance(each, TenureError) else self._placed(*each, next(answers))
            for each in made
        ]
        refused = [each for each in placed if isinstance(each, TenureError)]
        if not refused or errors == "return":
            return placed
        for at, each in enumerate(placed):
            if isinstance(each, TenureError):
                each.add_note(f"job {at} of the batch")
        raise ExceptionGroup(
            f"{len(refused)} of {len(placed)} jobs were refused; the others are stored", refused
        )

    @overload
    def handle(self, job_id: str, task: Task[..., R], /) -> Handle[R]: ...
    @overload
    def handle(self, job_id: str, /) -> Handle[Any]: ...
    def handle(self, job_id: str, task: Any = None, /) -> Handle[Any]:
        """A handle of a job that was submitted before; its task tells the type of its result."""
        if task is None:
            return Handle(self._connection, job_id)
        return Handle(self._connection, job_id, task=task.name, result_type=task.result_type)

    async def get(self, job_id: str) -> JobInfo | None:
        """The job as it is now, None if there is none (any more)."""
        record = await self._connection.ledger.get(job_id)
        return job_info(record) if record is not None else None

    async def find(
        self,
        *,
        state: State | Sequence[State] = (),
        task: str | Task[..., Any] = "",
        after: str = "",
        limit: int = 50,
    ) -> JobPage:
        """Jobs in these states (any, if none is named) and of this task, newest first.

        A page may be short, even empty, while `after` says that the search goes on.
        """
        contract = self._connection.contract
        states: tuple[State, ...] = (state,) if isinstance(state, str) else tuple(state)
        if unknown := sorted(set(states) - set(STATES)):
            raise UsageError(
                f"there is no state {', '.join(map(repr, unknown))}; the states are "
                f"{', '.join(STATES)}"
            )
        if limit < 1:
            raise UsageError(f"find: limit is at least 1, not {limit}")
        words = own_words(contract, states, known_words(contract)) if states else ()
        name = task if isinstance(task, str) else task.name
        page = await self._connection.ledger.find(
            Query(states=words, task=name, after=after, limit=limit)
        )
        found = [job_info(each) for each in page.jobs if not states or is_in(each, states)]
        return JobPage(found, page.after)

    async def counts(self) -> QueueCounts:
        """How many jobs are in which state, whether the queue is paused, how many workers live."""
        return queue_counts(self._connection.contract, await self._connection.ledger.counts())

    async def pause(self) -> None:
        """Let the queue hand out no more jobs to any worker; what runs goes on."""
        await self._connection.ledger.pause()

    async def resume(self) -> None:
        """Let the queue hand out jobs again."""
        await self._connection.ledger.resume()

    @overload
    async def schedule(
        self,
        what: Call[Any] | Task[[], Any],
        /,
        *,
        name: str = ...,
        cron: str = ...,
        every_s: float | timedelta | None = ...,
        tz: str = ...,
        missed: Missed = ...,
        **options: Unpack[SubmitOptions],
    ) -> ScheduleInfo: ...
    @overload
    async def schedule(
        self,
        what: str,
        payload: Any = ...,
        /,
        *,
        name: str = ...,
        cron: str = ...,
        every_s: float | timedelta | None = ...,
        tz: str = ...,
        missed: Missed = ...,
        **options: Unpack[SubmitOptions],
    ) -> ScheduleInfo: ...
    async def schedule(
        self,
        what: Any,
        /,
        *args: Any,
        name: str = "",
        cron: str = "",
        every_s: float | timedelta | None = None,
        tz: str = "",
        missed: Missed = "one",
        **options: Any,
    ) -> ScheduleInfo:
        """Store a job again and again: by a cron pattern, or every so many seconds.

        `schedule(report.call(days=7), cron="0 3 * * *", tz="Europe/Berlin")`, or a task by its name
        and payload. The workers of the queue store each job once, at its time. A schedule has the
        name of its task unless `name` says another; the same name again changes it. `missed` says
        what becomes of times at which no worker ran: nothing ("skip"), one job, or "all" of them.
        Options are those of a submit, without id, key and delay.
        """
        from tenure.plans.schedule import new_schedule  # few programs need it

        what = what.call() if hasattr(what, "call") else what
        job, _ = self._new_job(what, args, options)
        given = {**getattr(what, "options", {}), **options}
        if refused := sorted({"id", "key", "delay_s"} & given.keys()):
            raise UsageError(
                f"a schedule has no {' and no '.join(refused)}: its jobs get their ids and times "
                "from the schedule"
            )
        made = new_schedule(job, name=name, cron=cron, every_s=every_s, tz=tz, missed=missed)
        schedules = self._connection.schedules
        return schedule_info(await resend(lambda: schedules.put(made), tries=3, patience_s=3.0))

    async def schedules(self) -> list[ScheduleInfo]:
        """The schedules of the queue, the next one due first."""
        return [schedule_info(each) for each in await self._connection.schedules.list()]

    async def unschedule(self, name: str) -> bool:
        """Remove a schedule; False if there is none. Jobs that it has stored still run.

        One that a task declares comes back when a worker of that task starts.
        """
        schedules = self._connection.schedules
        return await resend(lambda: schedules.remove(name), tries=3, patience_s=3.0)

    async def chain(self, *calls: Call[Any] | Task[[], Any] | Named, id: str = "") -> Handle[Any]:  # noqa: A002
        """Store jobs that run one after another; the handle is that of the last one.

        A handler finds the result of the job before it in `await job.children`. If a job fails
        for good, the later ones do not run, and the handle raises that job's error. The same `id`
        again is the same chain. Steps get their ids from the chain, so calls have no id and no key.
        """
        made = [self._step(call) for call in calls]
        result_type = made[-1][1] if made else Any
        return await self._start(id, [[job] for job, _ in made], result_type)

    @overload
    async def gather(
        self, calls: Iterable[Call[Any] | Named], *, then: Call[R] | Task[[], R], id: str = ...
    ) -> Handle[R]: ...
    @overload
    async def gather(
        self, calls: Iterable[Call[Any] | Named], *, then: Named, id: str = ...
    ) -> Handle[Any]: ...
    async def gather(self, calls: Iterable[Any], *, then: Any, id: str = "") -> Handle[Any]:  # noqa: A002
        """Store jobs that run side by side, and one that runs when all are done: its handle.

        Its handler gets their results, in their order, by iterating over `await job.children`.
        Failures and `id` are as with `chain`.
        """
        last, result_type = self._step(then)
        stages = [[self._step(call)[0] for call in calls], [last]]
        return await self._start(id, stages, result_type)

    async def _start(
        self, flow_id: str, stages: list[list[NewJob]], result_type: Any
    ) -> Handle[Any]:
        flow_id = flow_id or new_job_id()
        flows = self._connection.flows
        answers = await resend(lambda: flows.start(flow_id, stages), tries=3, patience_s=3.0)
        for answer in answers:
            try:
                check_stored(answer)
            except TenureError as error:
                error.add_note(f"not all are stored; the same call with id={flow_id!r} does it")
                raise
        last = Step(flow_id, len(stages) - 1, 0).id
        task = stages[-1][0].task
        return Handle(self._connection, last, task=task, result_type=result_type)

    def _step(self, call: Any) -> tuple[NewJob, Any]:
        """A job of a chain or gather, and the type of its result."""
        task, payload, options = named_call(call) if isinstance(call, tuple) else (call, None, {})
        given = {**getattr(call, "options", {}), **options}
        if refused := sorted({"id", "key"} & given.keys()):
            raise UsageError(f"a job of a chain has no {' and no '.join(refused)}; the chain has")
        return self._new_job(task, (payload,) if isinstance(call, tuple) else (), dict(options))

    def _new_job(
        self, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[NewJob, Any]:
        """The job to store, and the type of its result."""
        return job_of_call(self._connection.contract, what, args, kwargs)

    def _made(self, call: Any) -> tuple[NewJob, Any] | TenureError:
        try:
            if isinstance(call, tuple):
                task, payload, options = named_call(call)
                return self._new_job(task, (payload,), dict(options))
            return self._new_job(call, (), {})
        except UsageError as error:
            return error

    def _placed(
        self, job: NewJob, result_type: Any, answer: Submitted
    ) -> Handle[Any] | TenureError:
        try:
            check_stored(answer)
        except TenureError as error:
            return error
        return self._handle(job, result_type, answer)

    def _handle(self, job: NewJob, result_type: Any, answer: Submitted) -> Handle[Any]:
        return Handle(
            self._connection,
            answer.job_id,
            task=job.task,
            result_type=result_type,
            replayed=answer.status == "replayed",
        )
