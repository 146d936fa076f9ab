"""The client in plain calls, for scripts, Flask, Django: one background loop runs the real one.

    from tenure.sync import Client

    with Client("streams+redis://127.0.0.1:6379/0") as client:
        greeting = client.submit(greet, name="Ada").result(timeout_s=30)

All clients of a process share the loop, which a daemon thread runs; any number of threads may use
one client. After a fork the child starts a loop of its own, and a client connects there anew.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, overload

from tenure.client import client as asynchronous
from tenure.client.client import Named
from tenure.client.handle import Handle as AsyncHandle
from tenure.client.records import Event, JobInfo, JobPage, QueueCounts, ScheduleInfo
from tenure.core.config import queue_url
from tenure.core.errors import TenureError, UsageError
from tenure.core.job import Missed
from tenure.core.portable import State, SubmitOptions

if TYPE_CHECKING:
    from typing import Unpack

    from tenure.worker.task import Call, Task

__all__ = ["Client", "Handle"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_END: Any = object()


class _Background:
    """The event loop of this process's clients, and its thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="tenure-sync", daemon=True).start()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run it in the loop and wait; an interrupt of the caller cancels it."""
        if threading.current_thread().name == "tenure-sync":
            call.close()
            raise UsageError("a synchronous client cannot be used in its own loop")
        future = asyncio.run_coroutine_threadsafe(call, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


_lock = threading.Lock()
_background: _Background | None = None


def _running() -> _Background:
    global _background  # noqa: PLW0603  # one loop for the process
    with _lock:
        if _background is None or _background.pid != os.getpid():
            _background = _Background()
        return _background


class Handle(Generic[R]):
    """A job by its id, as `tenure.Handle`, in plain calls."""

    __slots__ = ("_client", "_handle", "_pid", "id", "replayed", "task")

    def __init__(self, client: Client, handle: AsyncHandle[R]) -> None:
        self._client = client
        self._handle = handle
        self._pid = os.getpid()
        self.id = handle.id
        self.task = handle.task
        self.replayed = handle.replayed

    def __repr__(self) -> str:
        return repr(self._handle)

    def _here(self) -> AsyncHandle[R]:
        """The handle of this process: after a fork it is one of the client's new connection."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._handle = self._handle.on(self._client._here()._connection)
        return self._handle

    def result(self, *, timeout_s: float | None = None) -> R:
        """What the handler returned; raises `JobFailed`, `JobCancelled`, `Timeout`."""
        return _running().run(self._here().result(timeout_s=timeout_s))

    def wait(self, *, timeout_s: float | None = None) -> JobInfo:
        """The job as it is when it has ended, however it did."""
        return _running().run(self._here().wait(timeout_s=timeout_s))

    def status(self) -> JobInfo:
        """The job as it is now; raises `NotFound` if it is gone."""
        return _running().run(self._here().status())

    def events(self, *, after: str = "") -> Iterator[Event]:
        """The job's events until the event of its end; the loop runs between two of them."""
        events = self._here().events(after=after)
        try:
            while (event := _running().run(_next(events))) is not _END:
                yield event
        finally:
            _running().run(events.aclose())  # type: ignore[attr-defined]  # it is a generator

    def cancel(self) -> Literal["ended", "requested"]:
        """End the job: "ended" if it waited, "requested" if its worker is now told to stop."""
        return _running().run(self._here().cancel())

    def retry(self) -> None:
        """Send a job back that has ended."""
        _running().run(self._here().retry())


async def _next(events: Any) -> Any:
    return await anext(events, _END)


class Client:
    """Submits jobs to one queue and awaits them, as `tenure.Client`, in plain calls."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._pid = os.getpid()
        self._client = asynchronous.Client(queue)

    @classmethod
    def from_env(cls) -> Client:
        """A client of the configured queue; see `tenure.Client.from_env`."""
        return cls(queue_url())

    def __enter__(self) -> Client:
        _running().run(self._here().__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of connections."""
        _running().run(self._here().close())

    @overload
    def submit(self, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Handle[R]: ...
    @overload
    def submit(
        self, task: Task[[], R], payload: Mapping[str, Any], /, **options: Unpack[SubmitOptions]
    ) -> Handle[R]: ...
    @overload
    def submit(self, call: Call[R], /, **options: Unpack[SubmitOptions]) -> Handle[R]: ...
    @overload
    def submit(
        self, task: str, payload: Any = ..., /, **options: Unpack[SubmitOptions]
    ) -> Handle[Any]: ...
    def submit(self, what: Any, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Store one job; see `tenure.Client.submit`."""
        return Handle(self, _running().run(self._here().submit(what, *args, **kwargs)))

    @overload
    def submit_many(
        self, calls: Iterable[Call[R]], *, errors: Literal["raise"] = "raise"
    ) -> list[Handle[R]]: ...
    @overload
    def submit_many(
        self, calls: Iterable[Call[R]], *, errors: Literal["return"]
    ) -> list[Handle[R] | TenureError]: ...
    @overload
    def submit_many(
        self, calls: Iterable[Call[Any] | Named], *, errors: Literal["raise"] = "raise"
    ) -> list[Handle[Any]]: ...
    @overload
    def submit_many(
        self, calls: Iterable[Call[Any] | Named], *, errors: Literal["return"]
    ) -> list[Handle[Any] | TenureError]: ...
    def submit_many(
        self, calls: Iterable[Any], *, errors: Literal["raise", "return"] = "raise"
    ) -> Sequence[Any]:
        """Store many jobs in as few calls as the store allows; see `tenure.Client.submit_many`."""
        placed: Sequence[Any] = _running().run(self._here().submit_many(list(calls), errors=errors))
        return [each if isinstance(each, TenureError) else Handle(self, each) for each in placed]

    @overload
    def handle(self, job_id: str, task: Task[..., R], /) -> Handle[R]: ...
    @overload
    def handle(self, job_id: str, /) -> Handle[Any]: ...
    def handle(self, job_id: str, task: Any = None, /) -> Handle[Any]:
        """A handle of a job that was submitted before; its task tells the type of its result."""
        client = self._here()
        return Handle(self, client.handle(job_id) if task is None else client.handle(job_id, task))

    def get(self, job_id: str) -> JobInfo | None:
        """The job as it is now, None if there is none (any more)."""
        return _running().run(self._here().get(job_id))

    def find(
        self,
        *,
        state: State | Sequence[State] = (),
        task: str | Task[..., Any] = "",
        after: str = "",
        limit: int = 50,
    ) -> JobPage:
        """Jobs by state and task, newest first; see `tenure.Client.find`."""
        found = self._here().find(state=state, task=task, after=after, limit=limit)
        return _running().run(found)

    def counts(self) -> QueueCounts:
        """How many jobs are in which state, whether the queue is paused, how many workers live."""
        return _running().run(self._here().counts())

    def pause(self) -> None:
        """Let the queue hand out no more jobs to any worker; what runs goes on."""
        _running().run(self._here().pause())

    def resume(self) -> None:
        """Let the queue hand out jobs again."""
        _running().run(self._here().resume())

    @overload
    def schedule(
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
    def schedule(
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
    def schedule(self, what: Any, /, *args: Any, **given: Any) -> ScheduleInfo:
        """Store a job again and again; see `tenure.Client.schedule`."""
        return _running().run(self._here().schedule(what, *args, **given))

    def schedules(self) -> list[ScheduleInfo]:
        """The schedules of the queue, the next one due first."""
        return _running().run(self._here().schedules())

    def unschedule(self, name: str) -> bool:
        """Remove a schedule; False if there is none."""
        return _running().run(self._here().unschedule(name))

    def chain(self, *calls: Call[Any] | Task[[], Any] | Named, id: str = "") -> Handle[Any]:  # noqa: A002
        """Store jobs that run one after another; see `tenure.Client.chain`."""
        return Handle(self, _running().run(self._here().chain(*calls, id=id)))

    @overload
    def gather(
        self, calls: Iterable[Call[Any] | Named], *, then: Call[R] | Task[[], R], id: str = ...
    ) -> Handle[R]: ...
    @overload
    def gather(
        self, calls: Iterable[Call[Any] | Named], *, then: Named, id: str = ...
    ) -> Handle[Any]: ...
    def gather(self, calls: Iterable[Any], *, then: Any, id: str = "") -> Handle[Any]:  # noqa: A002
        """Store jobs and one that runs when all are done; see `tenure.Client.gather`."""
        return Handle(self, _running().run(self._here().gather(list(calls), then=then, id=id)))

    def _here(self) -> asynchronous.Client:
        """The client of this process: after a fork, the parent's connections are not ours."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._client = asynchronous.Client(self._queue)
        return self._client
