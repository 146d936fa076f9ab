"""The life of an attempt, in small steps over one frozen `Attempt`:

    adopt     a claimed lease becomes ours: its local deadline runs, the keeper sees it
    resolve   its task name leads to a handler, or the job is handed back for a worker that has one
              (see `unknown`)
    run       the handler runs in its way; it decodes the payload when it looks at it
    judge     what it returned or raised becomes the outcome to ask for (rules in core.retry)
    settle    the outcome joins the next batch
    announce  the store's verdict is counted

`ending` tells how an attempt is stopped from outside. From then on nothing that its handler still
returns or raises counts, and once its lease is lost nothing is written for it any more.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from random import Random
from typing import Any, Protocol

from tenure.core.errors import LeaseLost
from tenure.core.lease import Lease
from tenure.core.outcome import Outcome
from tenure.core.retry import judge
from tenure.worker.announcing import Announcer
from tenure.worker.ending import Ender
from tenure.worker.holding import Attempt, Ending, Held
from tenure.worker.job import Job, ReportCall, current_job
from tenure.worker.listening import Listeners
from tenure.worker.metrics import Metrics
from tenure.worker.outcomes import (
    TimedOut,
    backed_off,
    cancelled,
    childless,
    completed,
    released,
)
from tenure.worker.settling import Entry
from tenure.worker.slots import Slots
from tenure.worker.source import Source
from tenure.worker.task import Task, Tasks
from tenure.worker.unknown import Unknown
from tenure.worker.watching import Watch

Life = Callable[[Attempt, Task], Coroutine[Any, Any, None]]


class Ways(Protocol):
    """How handlers that do not run in the loop are run (see `worker.handlers`)."""

    def reporter(self, source: Source) -> ReportCall:
        """A `report` that is a plain call."""

    async def run(self, attempt: Attempt, task: Task, begun: Callable[[Attempt], None]) -> Any:
        """The handler's value (thread) or its outcome (process); `begun` when it really starts."""


class Tracer(Protocol):
    """Wraps an attempt in a span (see `worker.tracing`)."""

    async def trace(self, attempt: Attempt, life: Life, task: Task) -> None:
        """Run `life(attempt, task)` inside the span of this attempt."""


if sys.version_info >= (3, 12):

    def _spawn(
        life: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop
    ) -> asyncio.Task[None]:
        """Start at once: a handler that never waits is done before this returns."""
        return asyncio.Task(life, loop=loop, eager_start=True)

else:

    def _spawn(
        life: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop
    ) -> asyncio.Task[None]:
        return loop.create_task(life)


class Executor:
    """Runs attempts of all queues of one worker. `running`: those whose slot is not free yet."""

    def __init__(
        self,
        tasks: Tasks,
        *,
        slots: Slots,
        ways: Ways,
        metrics: Metrics,
        watch: Watch,
        clock: Callable[[], float],
        rng: Random,
        worker_id: str,
        cancel_grace_ms: int,
        unknown_task_ms: int,
        tracer: Tracer | None = None,
        debug: bool = False,
        listeners: Listeners | None = None,
    ) -> None:
        self._tasks = tasks
        self._slots = slots
        self._ways = ways
        self._metrics = metrics
        self._watch = watch
        self._clock = clock
        self._rng = rng
        self._worker_id = worker_id
        self._tracer = tracer
        self._reporters: dict[Source, ReportCall] = {}
        self._unknown = Unknown(tasks, limit_ms=unknown_task_ms, clock=clock, rng=rng)
        self._quiet: asyncio.Event | None = None
        self._ender = Ender(
            conclude=self.conclude, free=self._free, grace_ms=cancel_grace_ms, watch=watch
        )
        self.listeners = listeners or Listeners()
        self.announcer = Announcer(watch, self.listeners, debug=debug)
        self.running: dict[Held, Attempt] = {}

    # adopt, resolve -----------------------------------------------------------------------------

    def adopt(self, source: Source, leases: Iterable[Lease], sent: float) -> list[Attempt]:
        """Make leases ours; `sent` is when the claim was sent. Each has its slot already."""
        now = self._clock()
        attempts = []
        for lease in leases:
            task = self._tasks.find(lease.task)
            held = Held(lease, sent + lease.lease_ms / 1000, now)
            job = None if task is None else self._job(source, held, task)
            tally = self._metrics.tally(lease.queue, task.name if task else "(unknown)")
            if lease.attempt == 1 and lease.created_ms:
                claimed_ms = lease.lease_until_ms - lease.lease_ms  # both on the store's clock
                tally.wait.observe(max(0, claimed_ms - lease.created_ms) / 1000)
            attempt = Attempt(held, task, source, job, tally)
            source.held[held] = attempt
            self.running[held] = attempt
            attempts.append(attempt)
        return attempts

    def _job(self, source: Source, held: Held, task: Task) -> Job:
        if task.kind == "async":
            return Job(held, source.report, self._worker_id, task.timeout_s, _source=source)
        report = self._reporters.get(source)
        if report is None:
            report = self._reporters[source] = self._ways.reporter(source)
        return Job(held, report, self._worker_id, task.timeout_s, _source=source)

    def begin(self, attempts: Sequence[Attempt]) -> None:
        """Start adopted attempts, unless they ended in the meantime."""
        loop = asyncio.get_running_loop()  # asked for once: it is a system call
        timed = False
        for attempt in attempts:
            held, task = attempt.held, attempt.task
            if held.concluded:
                continue
            if held.until <= self._clock():
                held.lost = True
                self.end(attempt, "lost")
            elif task is None:
                self._refuse(attempt)
            else:
                attempt.tally.started += 1
                if self.listeners:
                    self.listeners.tell("active", attempt.job)
                self._launch(attempt, task, loop)
                timed = timed or task.timeout_s is not None
        if timed:  # after their first step, so that handlers that never wait need no timer
            loop.call_soon(self._arm_all, attempts)
        self._watch.tell("started", len(attempts))

    def _launch(self, attempt: Attempt, task: Task, loop: asyncio.AbstractEventLoop) -> None:
        if self._tracer is None:
            runner = _spawn(self._life(attempt, task), loop)
        else:
            runner = _spawn(self._tracer.trace(attempt, self._life, task), loop)
        if not attempt.held.freed:  # an eager task may be done already
            attempt.held.runner = runner

    def _refuse(self, attempt: Attempt) -> None:
        held = attempt.held
        say = partial(attempt.source.report, held)
        self.conclude(attempt, self._unknown.judge(held.lease, say))
        self._free(attempt)

    def release(self, attempts: Iterable[Attempt]) -> None:
        """Hand adopted attempts back unstarted."""
        for attempt in attempts:
            self.conclude(attempt, released(attempt.held.lease))
            self._free(attempt)

    # run, judge ---------------------------------------------------------------------------------

    async def _life(self, attempt: Attempt, task: Task) -> None:
        held = attempt.held
        outcome: Outcome | None
        current_job.set(attempt.job)
        held.started = self._clock()
        try:
            if task.kind == "async":
                held.begun = True
                value = await task.handler(attempt.job)
            else:
                value = await self._ways.run(attempt, task, self._begun)
            if task.kind == "process":
                outcome = value
                if value.kind == "fail":
                    outcome = backed_off(attempt, value, RuntimeError(value.failure.message))
            else:
                say = partial(attempt.source.report, held)
                outcome = completed(held.lease, value, say)
        except GeneratorExit:  # the loop is being torn down: there is nobody left to tell
            raise
        except BaseException as error:
            outcome = self._judge(held, task, error)
            if outcome is not None and outcome.kind == "fail":
                outcome = backed_off(attempt, outcome, error)
        self.conclude(attempt, outcome)
        self._free(attempt)

    def _begun(self, attempt: Attempt) -> None:
        """A thread or process took it up: only now its time runs."""
        attempt.held.started = self._clock()
        self._ender.arm(attempt)

    def _arm_all(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            if not attempt.held.concluded and attempt.task and attempt.task.kind == "async":
                self._ender.arm(attempt)

    def _judge(self, held: Held, task: Task, error: BaseException) -> Outcome | None:
        if held.ended:
            return None  # `conclude` knows what becomes of it
        if isinstance(error, LeaseLost):
            if error.job_id == held.lease.job_id:
                held.lost = True
                return None
            error = RuntimeError(f"the handler met a lost lease of another job: {error}")
        return judge(held.lease, error, task.retry, self._rng.random())

    # settle -------------------------------------------------------------------------------------

    def end(self, attempt: Attempt, why: Ending) -> None:
        """Stop an attempt from outside; see `worker.ending`."""
        self._ender.end(attempt, why)

    def end_unbegun(self) -> None:
        """Hand back what still waits for a thread or a process."""
        for attempt in list(self.running.values()):
            if not attempt.held.begun and attempt.held.runner is not None:
                self.end(attempt, "shutdown")

    def conclude(self, attempt: Attempt, outcome: Outcome | None = None) -> None:
        """Choose the outcome, once: an attempt that was ended gets the outcome of its ending."""
        held = attempt.held
        if held.concluded:
            return
        if held.ended:
            outcome = self._ended(attempt)
        if outcome is not None and not held.lost:
            outcome = attempt.source.fit(held, outcome)
        held.concluded = True
        held.ran_s = self._clock() - held.started
        if self._quiet is not None:
            self._check_quiet(self._quiet)
        if held.lost or outcome is None:
            self.announcer.lost(attempt, "it ran out, or the store said so")
            return
        if outcome.until == "children" and not attempt.source.has_children:
            outcome = childless(held.lease)
        held.outcome = outcome
        attempt.source.settle(Entry(held, outcome, attempt))

    def _ended(self, attempt: Attempt) -> Outcome | None:
        held, task = attempt.held, attempt.task
        match held.ended:
            case "cancel":
                return cancelled(held.lease)
            case "shutdown":
                return released(held.lease)
            case "timeout":
                limit_s = task.timeout_s if task else None
                late = TimedOut(f"the handler took longer than its timeout of {limit_s} s")
                policy = task.retry if task else None
                outcome = judge(held.lease, late, policy, self._rng.random())
                return backed_off(attempt, outcome, late) if outcome.kind == "fail" else outcome
            case _:
                return None

    def _free(self, attempt: Attempt) -> None:
        """The handler is gone: its slot is free."""
        held = attempt.held
        if held.freed:
            return
        held.freed = True
        if held.timer is not None:
            held.end_timer()
        held.runner = None
        del self.running[held]
        self._slots.give(attempt.source.share, 1)

    def quiet(self) -> asyncio.Event:
        """Set as soon as every attempt has its outcome; asked for once no more are begun."""
        self._quiet = asyncio.Event()
        self._check_quiet(self._quiet)
        return self._quiet

    def _check_quiet(self, quiet: asyncio.Event) -> None:
        if all(attempt.held.concluded for attempt in self.running.values()):
            quiet.set()
