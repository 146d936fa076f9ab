"""An attempt at a job: the record the worker keeps of it, and the `Job` that its handler sees."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import Context, ContextVar, copy_context
from datetime import timedelta
from typing import Any, Literal

import msgspec
import structlog

from tenure.core.encoding import from_json, storable_json, whole_text
from tenure.core.errors import UsageError
from tenure.core.job import derived_id
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome
from tenure.core.portable import parts_of_call
from tenure.worker.events import Tally
from tenure.worker.task import Task

TERMINAL_TYPES = frozenset(
    ("done", "error", "canceled", "cancelled", "completed", "failed", "succeeded", "dead_letter")
)
"""Events that end a job's stream: only a settled outcome may write them."""

StopReason = Literal["", "lost", "cancel", "timeout", "shutdown"]
"""Why an attempt is stopped from outside: its lease was lost, a cancel was requested, its timeout
passed, the worker stops. From then on the handler's return value or exception is ignored."""


class Attempt(msgspec.Struct, eq=False):
    """One lease, from claim to verdict. `task` is None if this worker has no handler for it.

    Two threads share it. The keeper's thread writes `lease`, `until`, `lost` and `extending`, the
    worker's loop all the rest. Each write sets one attribute, so no lock is needed.

    until            local deadline, on our clock: from then on another worker may own the job. It
                     counts from when the last confirmed claim or extend was *sent*
    extending        the keeper extends the lease; when off, the lease is left to expire
    stop_reason      why the attempt is stopped from outside; empty if it is not
    handler_started  the handler was really started
    outcome_chosen   the outcome is chosen, once and for all
    slot_freed       the slot is free again; for a thread that cannot be stopped this is later
    unsent           how many reports are not written yet; the outcome waits for them
    pending_outcome  that outcome, as the `Entry` to be settled
    error            what the handler raised, and the `context` in which it did, until it is logged
    source, job      set by the modules `claim` and `attempt`; typed Any to avoid a circular import
    """

    lease: Lease
    until: float
    started: float
    task: Task | None = None
    source: Any = None
    job: Any = None
    tally: Tally = msgspec.field(default_factory=lambda: Tally("", ""))
    lost: bool = False
    extending: bool = True
    stop_reason: StopReason = ""
    handler_started: bool = False
    outcome_chosen: bool = False
    slot_freed: bool = False
    asked_to_cancel: bool = False
    ran_s: float = 0.0
    unsent: int = 0
    runner: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    pending_outcome: Any = None
    outcome: Outcome | None = None
    error: BaseException | None = None
    context: Context | None = None

    def end_timer(self) -> None:
        """Drop the pending timeout or grace period, if there is one."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


ReportCall = Callable[[Attempt, Report], Awaitable[None]]
AskVerb = Literal["submit", "children"]
AskCall = Callable[[Attempt, AskVerb, bytes], Coroutine[Any, Any, Any]]
"""What a job asks of its queue: the argument is JSON, a `NewCall` for "submit"."""


class NewCall(msgspec.Struct, frozen=True):
    """A job that a handler submits: its payload is JSON text, its options have an id."""

    task: str
    payload: str
    options: dict[str, Any]


_UNREAD: Any = object()

current_job: ContextVar[Job] = ContextVar("tenure_job")
"""The job whose handler is running here; the logs add its ids to every line."""


class Written:
    """What a report in a thread or child returns. It is written already, so awaiting it is free."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


WRITTEN = Written()


class Job(msgspec.Struct, eq=False):
    """One attempt at one job, as its handler sees it.

    `lease` is the lease as last confirmed. `cancelled` becomes True when the attempt was ended from
    outside (lease lost, cancel requested, timeout, shutdown). A thread cannot be stopped, so its
    handler must check it; what it returns after that is ignored.
    """

    _attempt: Attempt
    _report: ReportCall
    _worker_id: str
    _timeout_s: float | None = None
    _ask: AskCall | None = None
    _payload: Any = _UNREAD
    _log: JobLog | None = None
    _opts: dict[str, Any] | None = None
    _calls: Counter[tuple[str, str]] | None = None
    _state: Any = None

    @property
    def id(self) -> str:
        """The job's id in its queue."""
        return self._attempt.lease.job_id

    @property
    def task(self) -> str:
        """The task name under which it was submitted."""
        return self._attempt.lease.task

    @property
    def queue(self) -> str:
        """The queue it came from, in the contract's own words."""
        return self._attempt.lease.queue

    @property
    def attempt(self) -> int:
        """1 for the first start."""
        return self._attempt.lease.attempt

    @property
    def max_attempts(self) -> int:
        """How many starts the job may have; 0 when the store does not say."""
        return self._attempt.lease.max_attempts

    @property
    def lease(self) -> Lease:
        """The lease under which this attempt runs, as last confirmed by the store."""
        return self._attempt.lease

    @property
    def payload(self) -> Any:
        """The decoded payload; one that is not JSON comes as `{"_raw": text}`."""
        if self._payload is _UNREAD:
            self._payload = read_payload(self._attempt.lease.payload)
        return self._payload

    @property
    def opts(self) -> dict[str, Any]:
        """The options it was added with, in the contract's own words; {} where it keeps none."""
        if self._opts is None:
            source = self._attempt.source
            read = source.features.job_options if source is not None else None
            self._opts = read(self._attempt.lease) if read is not None else {}
        return self._opts

    @property
    def state(self) -> Any:
        """What the worker's `lifespan` yielded, such as a pool or a model; None without one.

        A child process has its own, from a `lifespan` of its own.
        """
        source = self._attempt.source
        return source.state if source is not None else self._state

    @property
    def cancelled(self) -> bool:
        """True when this attempt is over: stop soon, without further effects."""
        return self._attempt.lost or self._attempt.stop_reason != ""

    @property
    def deadline(self) -> float | None:
        """When the timeout ends the attempt, by `time.monotonic()`; None without a timeout."""
        return None if self._timeout_s is None else self._attempt.started + self._timeout_s

    @property
    def log(self) -> JobLog:
        """`await job.log("a line")` adds to the job's own log, which its followers can read;
        `job.log.info(...)` and the like write to the worker's log."""
        if self._log is None:
            self._log = JobLog(self)
        return self._log

    def update_data(self, data: Any) -> Awaitable[None]:
        """Replace the payload, here and in the store: the next attempt begins with it.

        `await` it in an `async def` handler, as `report`. Not all contracts have it.
        """
        report = Report(lease=self._attempt.lease, payload=storable_json(data)[0])
        self._payload = data
        return self._report(self._attempt, report)

    @property
    def children(self) -> Any:
        """The jobs that this one waited for, as `Children`: iterating gives their results.

        `await job.children` in an `async def` handler; elsewhere `job.children` waits by itself.
        """
        return self._asked("children", b"null")

    def submit(self, what: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Store a job in the queue of this one; its id. The arguments are those of `Client.submit`.

        If this attempt fails after that, the next one makes the same call and gets the same job:
        the id follows from this job, the task and the payload. A payload with the time in it makes
        another job each time. `await` it in an `async def` handler; in a thread or process handler
        it is a plain call.

        Raises `InvalidJob`, `Conflict` and `QueueFull` as `Client.submit` does.
        """
        task, payload, options, _ = parts_of_call(what, args, kwargs)
        lease, text = self._attempt.lease, payload.decode()
        self._calls = self._calls or Counter()
        self._calls[task, text] += 1
        parts = (lease.queue, lease.job_id, task, text, self._calls[task, text])
        given = options | {"id": options.get("id") or derived_id(*parts)}
        for name, value in given.items():
            if isinstance(value, timedelta):
                given[name] = value.total_seconds()
        return self._asked("submit", msgspec.json.encode(NewCall(task, text, given)))

    def _asked(self, verb: AskVerb, argument: bytes) -> Any:
        """Ask the worker, which speaks to the queue; a coroutine in a loop, else the answer."""
        if self._ask is None:
            raise UsageError("this job has no queue that could be asked")
        asking = self._ask(self._attempt, verb, argument)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            source = self._attempt.source
            if source is None:
                return asyncio.run(asking)
            return asyncio.run_coroutine_threadsafe(asking, source.loop).result()
        return asking

    def report(
        self,
        progress: Any = None,
        step: str = "",
        *,
        type: str = "progress",  # noqa: A002 - the contracts' own word for it
        data: Any = None,
    ) -> Awaitable[None]:
        """Publish progress or another event to the followers of the job.

        `await` it in an `async def` handler; in a thread or process handler it is a plain call. It
        returns when the store has written it and raises `LeaseLost` when this attempt is over, and
        ValueError or TypeError for what is not JSON. Characters that the store cannot hold are
        replaced by U+FFFD.
        """
        if type in TERMINAL_TYPES or not type:
            raise UsageError(
                f"a handler cannot report {type!r}: the worker writes the end of a job when the "
                "handler returns or raises; use another type for a report"
            )
        report = Report(
            lease=self._attempt.lease,
            type=whole_text(type),
            step=whole_text(step),
            data=b"{}" if data is None else storable_json(data)[0],
            progress=b"" if progress is None else storable_json(progress)[0],
        )
        return self._report(self._attempt, report)


class JobLog:
    """Call it to add a line to the job's log. Its methods are those of a structlog logger."""

    __slots__ = ("_job", "_logger")

    def __init__(self, job: Job) -> None:
        self._job = job
        self._logger: Any = None

    def __call__(self, text: str) -> Awaitable[None]:
        """Add a line to the job's log. As with `job.report`, await it, or just call it in a thread
        or process handler. Queues without logs publish it as an event `log`."""
        return self._job.report(type="log", data={"text": str(text)})

    def __getattr__(self, name: str) -> Any:
        if self._logger is None:
            self._logger = structlog.get_logger("tenure.job").bind(**job_facts(self._job))
        return getattr(self._logger, name)


CallNext = Callable[[Job], Awaitable[Any]]
Middleware = Callable[[Job, CallNext], Awaitable[Any]]
"""Wraps every attempt: `async (attempt, call_next)`. `await call_next(attempt)` runs the handler,
with its value or error. What the middleware returns or raises is what counts."""
Lifespan = Callable[[], AbstractAsyncContextManager[Any]]
"""What is open while a worker serves; handlers have the value as `job.state`."""


def through(middleware: Sequence[Middleware], handler: CallNext) -> CallNext:
    """The handler inside of all middleware, of which the first is the outermost."""

    async def innermost(job: Job) -> Any:
        try:
            return await handler(job)
        except BaseException:
            job._attempt.context = copy_context()  # with what the middleware has set
            raise

    call: CallNext = innermost
    for each in reversed(middleware):
        call = _wrapped(each, call)
    return call


def _wrapped(middleware: Middleware, call: CallNext) -> CallNext:
    return lambda job: middleware(job, call)


def read_payload(raw: bytes) -> Any:
    """The JSON value, or the text under `_raw` when it is none."""
    try:
        return from_json(raw)
    except msgspec.DecodeError:
        return {"_raw": raw.decode(errors="replace")}


def job_facts(job: Job) -> dict[str, Any]:
    """The fields of a log line about this job; with `trace_id` if its submitter sent one."""
    facts = {**attempt_facts(job._attempt), "worker_id": job._worker_id}
    parts = job._attempt.lease.trace.split("-")
    return facts | {"trace_id": parts[1]} if len(parts) >= 4 else facts


def attempt_facts(attempt: Attempt) -> dict[str, Any]:
    """The fields of a log line about an attempt; its queue has the name that metrics use."""
    lease = attempt.lease
    return {
        "job_id": lease.job_id,
        "task": lease.task,
        "queue": attempt.tally.queue or lease.queue,
        "attempt": lease.attempt,
    }
