"""What a handler sees of its job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from typing import Any, cast

import msgspec
import structlog

from tenure.core.errors import UsageError
from tenure.core.lease import Lease, Report
from tenure.core.storable import to_json, whole_text
from tenure.core.values import from_json
from tenure.worker.holding import Held

ReportCall = Callable[[Held, Report], Awaitable[None]]

TERMINAL_TYPES = frozenset(
    ("done", "error", "canceled", "cancelled", "completed", "failed", "succeeded", "dead_letter")
)
"""Events that end a job's stream: only a settled outcome may write them."""

_UNREAD: Any = object()

current_job: ContextVar[Job] = ContextVar("tenure_job")
"""The job whose handler is running here; `worker.logs` adds its ids to every line."""


class Written:
    """What a report in a thread or child returns: it is written already, awaiting it is free."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


WRITTEN = Written()


class Job(msgspec.Struct, eq=False):
    """One attempt at one job, as its handler sees it.

    `lease` is the lease as last confirmed; `cancelled` turns True when the attempt was ended from
    outside (lease lost, cancel asked for, timeout, shutdown): a thread handler must look at it,
    because a thread cannot be stopped, and what it returns after that is thrown away.
    """

    _held: Held
    _report: ReportCall
    _worker_id: str
    _timeout_s: float | None = None
    _payload: Any = _UNREAD
    _log: JobLog | None = None
    _source: Any = None

    @property
    def id(self) -> str:
        """The job's id in its queue."""
        return self._held.lease.job_id

    @property
    def task(self) -> str:
        """The task name under which it was submitted."""
        return self._held.lease.task

    @property
    def queue(self) -> str:
        """The queue it came from, in the contract's own words."""
        return self._held.lease.queue

    @property
    def attempt(self) -> int:
        """1 for the first start."""
        return self._held.lease.attempt

    @property
    def max_attempts(self) -> int:
        """How many starts the job may have; 0 when the store does not say."""
        return self._held.lease.max_attempts

    @property
    def lease(self) -> Lease:
        """The lease under which this attempt runs, as last confirmed by the store."""
        return self._held.lease

    @property
    def payload(self) -> Any:
        """The decoded payload; one that is not JSON comes as `{"_raw": text}`."""
        if self._payload is _UNREAD:
            self._payload = read_payload(self._held.lease.payload)
        return self._payload

    @property
    def opts(self) -> dict[str, Any]:
        """The options it was added with, in the contract's own words; {} where it keeps none."""
        extra = self._held.lease.extra
        opts = extra.get("opts") if isinstance(extra, dict) else getattr(extra, "opts", None)
        if isinstance(opts, bytes):  # in a child process
            import json

            return cast("dict[str, Any]", json.loads(opts))
        return opts or {}

    @property
    def cancelled(self) -> bool:
        """True when this attempt is over: stop soon, and without further effects."""
        return self._held.lost or self._held.ended != ""

    @property
    def deadline(self) -> float | None:
        """When the timeout strikes, on the clock of `time.monotonic()`; None without a timeout."""
        return None if self._timeout_s is None else self._held.started + self._timeout_s

    @property
    def log(self) -> JobLog:
        """`await job.log("a line")` adds to the job's own log, which its followers can read;
        `job.log.info(...)` and the like write to the worker's log."""
        if self._log is None:
            self._log = JobLog(self)
        return self._log

    def update_data(self, data: Any) -> Awaitable[None]:
        """Replace the payload, here and in the store: the next attempt begins with it.

        `await` it in an `async def` handler, as `report`. Only where the contract has it (bullmq).
        """
        news = Report(lease=self._held.lease, payload=to_json(data)[0])
        self._payload = data
        return self._report(self._held, news)

    def children(self) -> Any:
        """What the children of this job left, and which are pending, where jobs have children.

        `await` it in an `async def` handler; in a thread it is a plain call.
        """
        source = self._source
        if source is None:
            raise UsageError("a handler in a process of its own cannot ask for its children")
        asking = source.children(self.id)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
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
        """Publish progress or any other news to whoever follows the job.

        `await` it in an `async def` handler; in a thread or process handler it is a plain call. It
        returns when the store has written it and raises `LeaseLost` when this attempt is over, and
        ValueError or TypeError for what is not JSON. Characters that the store cannot hold are
        replaced by U+FFFD.
        """
        if type in TERMINAL_TYPES or not type:
            raise UsageError(
                f"a handler cannot report {type!r}: the worker writes the end of a job when the "
                "handler returns or raises; use another type for news"
            )
        news = Report(
            lease=self._held.lease,
            type=whole_text(type),
            step=whole_text(step),
            data=b"{}" if data is None else to_json(data)[0],
            progress=b"" if progress is None else to_json(progress)[0],
        )
        return self._report(self._held, news)


class JobLog:
    """The log of a job by a call, and a structlog logger that knows the job by its methods."""

    __slots__ = ("_job", "_logger")

    def __init__(self, job: Job) -> None:
        self._job = job
        self._logger: Any = None

    def __call__(self, text: str) -> Awaitable[None]:
        """Add a line to the job's log, as `job.report` publishes news: await it, or just call it in
        a thread or process handler. Queues without logs publish it as an event `log`."""
        return self._job.report(type="log", data={"text": str(text)})

    def __getattr__(self, name: str) -> Any:
        if self._logger is None:
            self._logger = structlog.get_logger("tenure.job").bind(**job_facts(self._job))
        return getattr(self._logger, name)


def read_payload(raw: bytes) -> Any:
    """The JSON value, or the text under `_raw` when it is none."""
    try:
        return from_json(raw)
    except msgspec.DecodeError:
        return {"_raw": raw.decode(errors="replace")}


def job_facts(job: Job) -> dict[str, Any]:
    """What a log line about this job should carry; `trace_id` where its submitter sent one."""
    facts = {
        "job_id": job.id,
        "task": job.task,
        "queue": job.queue,
        "attempt": job.attempt,
        "worker_id": job._worker_id,
    }
    parts = job._held.lease.trace.split("-")
    return facts | {"trace_id": parts[1]} if len(parts) >= 4 else facts
