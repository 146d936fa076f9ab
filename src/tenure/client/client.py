"""The client: submit jobs to one queue of any contract, and look after them.

async with Client("streams+redis://127.0.0.1:6379/0") as client:
    handle = await client.submit(greet, name="Ada")
    greeting = await handle.result(timeout_s=30)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar, overload

from tenure.client.connection import Connection, named_call
from tenure.client.handle import Handle
from tenure.client.records import (
    JobInfo,
    JobPage,
    QueueCounts,
    job_info,
    queue_counts,
)
from tenure.core.config import queue_url
from tenure.core.endpoint import check_stored
from tenure.core.errors import TenureError, UsageError
from tenure.core.job import NewJob, Submitted
from tenure.core.portable import State, SubmitOptions, is_in, known_words, own_words
from tenure.core.seam import Query

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
    wait share one connection, which reads the queue's news. `tenure.sync.Client` is the same for
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
        self, calls: Iterable[Named], *, errors: Literal["raise"] = "raise"
    ) -> list[Handle[Any]]: ...
    @overload
    async def submit_many(
        self, calls: Iterable[Named], *, errors: Literal["return"]
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

    def _new_job(
        self, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[NewJob, Any]:
        """The job to store, and the type of its result."""
        if isinstance(what, str):
            if len(args) > 1:
                raise UsageError("a task by its name takes one payload, and options by name")
            return self._connection.new_job(what, args[0] if args else {}, kwargs), Any
        if hasattr(what, "payload"):  # a call
            options = {**what.options, **kwargs}
            job = self._connection.new_job(what.task.name, what.payload, options)
            return job, what.task.result_type
        if not hasattr(what, "call"):
            raise UsageError(
                f"{what!r} is no task; decorate it with @task(name), or give the name of a task"
            )
        if what.parameters is None and args:
            call, options = what.call(args[0]), kwargs
        else:
            call, options = what.call(*args, **kwargs), {}
        return self._connection.new_job(what.name, call.payload, options), what.result_type

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
