"""The life of an attempt, in steps:

    adopt    a claimed lease becomes an attempt: its local deadline runs, the keeper extends it
    begin    the handler of its task runs in the loop, a thread or a process; a job without a
             handler here is handed back (see `settle.UnknownTasks`)
    decide   what the handler returned or raised becomes an outcome (rules in `core.retry`)
    settle   the outcome joins the next batch
    settled  the store's verdict, or the loss of the lease, is counted

An attempt can be ended from outside: by its timeout, a lost lease, a cancel request or shutdown. An
`async def` handler gets a `CancelledError`, a process is killed. A thread cannot be stopped; its
handler must check `job.cancelled`. A handler that still runs after the grace period is abandoned:
its outcome is settled without it. An abandoned thread keeps its slot until it returns. After a
lease is lost, nothing is written for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

import structlog

from tenure.core.errors import LeaseLost
from tenure.core.lease import Lease
from tenure.core.outcome import COMPLETED, VERDICT_NAMES, Buried, Outcome, Retried, Verdict
from tenure.core.retry import decide_outcome
from tenure.worker.claim import Context, Source
from tenure.worker.job import Attempt, Job, StopReason, attempt_facts, current_job
from tenure.worker.plans import ask, continued
from tenure.worker.pools import HandlerPools, report_from_thread
from tenure.worker.settle import (
    Entry,
    HandlerFailed,
    TimedOut,
    UnknownTasks,
    cancelled_outcome,
    completed_outcome,
    no_children_outcome,
    with_custom_backoff,
)
from tenure.worker.task import Task, Tasks
from tenure.worker.telemetry import Tracer, log_failure

log = structlog.get_logger("tenure.worker")

if sys.version_info >= (3, 12):

    def _spawn(
        run: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop
    ) -> asyncio.Task[None]:
        """Start eagerly: a handler that never waits is done before this returns."""
        return asyncio.Task(run, loop=loop, eager_start=True)

else:

    def _spawn(
        run: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop
    ) -> asyncio.Task[None]:
        return loop.create_task(run)


class Executor:
    """Runs attempts of all queues of one worker. `running`: those whose slot is not free yet."""

    def __init__(
        self,
        tasks: Tasks,
        pools: HandlerPools,
        context: Context,
        tracer: Tracer | None,
    ) -> None:
        self._tasks = tasks
        self._pools = pools
        self._tracer = tracer
        self._slots = context.slots
        self._metrics = context.metrics
        self._watch = context.watch
        self._listeners = context.listeners
        self._clock = context.clock
        self._rng = context.rng
        self._worker_id = context.worker_id
        self._debug = context.settings.debug
        self._grace_s = context.settings.cancel_grace_ms / 1000
        self._unknown = UnknownTasks(
            tasks,
            limit_ms=context.settings.unknown_task_ms,
            clock=context.clock,
            rng=context.rng,
        )
        self._all_concluded: asyncio.Event | None = None
        self.running: dict[Attempt, None] = {}

    # adopt, begin -------------------------------------------------------------------------------

    def adopt(self, source: Source, leases: Iterable[Lease], sent: float) -> list[Attempt]:
        """Make attempts of leases that have their slots; `sent` is when the claim was sent."""
        now = self._clock()
        attempts = []
        for lease in leases:
            task = self._tasks.find(lease.task)
            tally = self._metrics.tally(source.name, task.name if task else "(unknown)")
            until = sent + lease.lease_ms / 1000
            attempt = Attempt(lease, until, now, task=task, source=source, tally=tally)
            if task is not None:
                report = source.report if task.kind == "async" else report_from_thread
                attempt.job = Job(attempt, report, self._worker_id, task.timeout_s, ask)
            if lease.attempt == 1 and lease.created_ms:
                claimed_ms = lease.lease_until_ms - lease.lease_ms  # both on the store's clock
                tally.wait.observe(max(0, claimed_ms - lease.created_ms) / 1000)
            source.attempts[attempt] = None
            self.running[attempt] = None
            attempts.append(attempt)
        return attempts

    def begin(self, attempts: Sequence[Attempt]) -> None:
        """Start adopted attempts, unless they ended in the meantime."""
        loop = asyncio.get_running_loop()  # once, because it makes a system call
        timed = False
        for attempt in attempts:
            task = attempt.task
            if attempt.outcome_chosen:
                continue
            if attempt.until <= self._clock():
                attempt.lost = True
                self.end(attempt, "lost")
            elif task is None:
                report = partial(attempt.source.report, attempt)
                self.conclude(attempt, self._unknown.decide_outcome(attempt, report))
                self._free(attempt)
            else:
                attempt.tally.started += 1
                if self._listeners:
                    self._listeners.tell("active", attempt.job)
                if self._tracer is None:
                    runner = _spawn(self._run(attempt, task), loop)
                else:
                    run = partial(self._run, attempt, task)
                    runner = _spawn(self._tracer.trace(attempt, run), loop)
                if not attempt.slot_freed:  # an eager task may be done already
                    attempt.runner = runner
                timed = timed or task.timeout_s is not None
        if timed:  # after the first step: handlers that never wait need no timer
            loop.call_soon(self._arm_all, attempts)
        self._watch.tell("started", len(attempts))

    def release(self, attempts: Iterable[Attempt]) -> None:
        """Hand adopted attempts back unstarted."""
        for attempt in attempts:
            self.conclude(attempt, Outcome(attempt.lease, "release"))
            self._free(attempt)

    # run, decide -------------------------------------------------------------------------------

    async def _run(self, attempt: Attempt, task: Task) -> None:
        outcome: Outcome | None
        current_job.set(attempt.job)
        attempt.started = self._clock()
        try:
            if task.kind == "async":
                attempt.handler_started = True
                value = await task.run(attempt.job)
            else:
                value = await self._pools.run(attempt, task, self._handler_started)
            if task.kind == "process":
                outcome = value
                if value.failure is not None:
                    attempt.error = HandlerFailed(value)
                    if value.kind == "fail":
                        outcome = with_custom_backoff(attempt, value, attempt.error)
            else:
                outcome = completed_outcome(
                    attempt.lease, value, partial(attempt.source.report, attempt)
                )
            if outcome is not None and outcome.kind == "complete" and "@" in attempt.lease.job_id:
                outcome = await continued(attempt, outcome)
        except GeneratorExit:  # the loop is being torn down
            raise
        except BaseException as error:
            outcome = self._outcome_of_error(attempt, task, error)
        self.conclude(attempt, outcome)
        self._free(attempt)

    def _handler_started(self, attempt: Attempt) -> None:
        """A thread or process started the handler: its timeout runs from now."""
        attempt.started = self._clock()
        self._arm(attempt)

    def _outcome_of_error(
        self, attempt: Attempt, task: Task, error: BaseException
    ) -> Outcome | None:
        if attempt.stop_reason:
            return None  # `conclude` chooses the outcome
        if isinstance(error, LeaseLost):
            if error.job_id == attempt.lease.job_id:
                attempt.lost = True
                return None
            error = RuntimeError(f"the handler met a lost lease of another job: {error}")
        if attempt.context is None:
            attempt.context = contextvars.copy_context()
        return self._failed(attempt, task, error)

    def _failed(self, attempt: Attempt, task: Task, error: BaseException) -> Outcome:
        attempt.error = error
        outcome = decide_outcome(attempt.lease, error, task.retry, self._rng.random())
        return with_custom_backoff(attempt, outcome, error) if outcome.kind == "fail" else outcome

    # settle -------------------------------------------------------------------------------------

    def conclude(self, attempt: Attempt, outcome: Outcome | None = None) -> None:
        """Choose the outcome, once; if the attempt was ended, by the reason for that."""
        if attempt.outcome_chosen:
            return
        if attempt.stop_reason:
            outcome = self._stopped_outcome(attempt)
        if outcome is not None and not attempt.lost:
            outcome = attempt.source.replace_nul(attempt, outcome)
        attempt.outcome_chosen = True
        attempt.ran_s = self._clock() - attempt.started
        if self._all_concluded is not None:
            self._set_if_concluded(self._all_concluded)
        if attempt.lost or outcome is None:
            self._lost(attempt, "it ran out, or the store said so")
            return
        if outcome.until == "children" and not attempt.source.features.parks:
            outcome = no_children_outcome(attempt.lease)
        attempt.outcome = outcome
        attempt.source.settle(attempt, outcome)

    def _stopped_outcome(self, attempt: Attempt) -> Outcome | None:
        task = attempt.task
        match attempt.stop_reason:
            case "cancel":
                return cancelled_outcome(attempt.lease)
            case "shutdown":
                return Outcome(attempt.lease, "release")
            case "timeout" if task is not None:
                late = TimedOut(f"the handler took longer than its timeout of {task.timeout_s} s")
                return self._failed(attempt, task, late)
            case _:
                return None

    def settled(self, entries: Sequence[Entry], verdicts: Sequence[Verdict]) -> None:
        """The store answered a batch of outcomes."""
        source: Source = entries[0].attempt.source
        for entry, verdict in zip(entries, verdicts, strict=True):
            attempt = entry.attempt
            self._count(attempt, VERDICT_NAMES[type(verdict)])
            if self._listeners:
                self._listeners.ended(attempt.job, attempt.outcome, verdict)
            if verdict is not COMPLETED:
                self._log_verdict(attempt, verdict)
            source.forget(attempt)
        source.answered("settle")
        self._watch.tell("settled", len(entries))

    def _log_verdict(self, attempt: Attempt, verdict: Verdict) -> None:
        failed = attempt.outcome is not None and attempt.outcome.failure is not None
        if isinstance(verdict, LeaseLost):
            log.warning("lease lost", **attempt_facts(attempt), reason=verdict.reason)
        elif failed and isinstance(verdict, Retried | Buried):
            job = attempt.job or Job(attempt, attempt.source.report, self._worker_id)
            log_failure(attempt, job, retried=isinstance(verdict, Retried))
        attempt.error = attempt.context = None  # they hold the frames of the handler

    def dropped(self, entry: Entry, error: Exception) -> None:
        """The store will never accept this outcome: the lease is lost."""
        reason = error.reason if isinstance(error, LeaseLost) else f"its outcome failed: {error}"
        self._lost(entry.attempt, reason)

    def _lost(self, attempt: Attempt, reason: str) -> None:
        """Write nothing more for this attempt; its lease expires."""
        attempt.lost = True
        attempt.extending = False
        attempt.error = attempt.context = None
        attempt.source.forget(attempt)
        log.warning("lease lost", **attempt_facts(attempt), reason=reason)
        self._count(attempt, "lost")

    def _count(self, attempt: Attempt, outcome: str) -> None:
        tally = attempt.tally
        tally.finished[outcome] = tally.finished.get(outcome, 0) + 1
        tally.run.observe(attempt.ran_s)
        if outcome == "retried":
            tally.retried += 1
        elif outcome == "lost":
            tally.lost += 1
            self._watch.tell("lost")
        if self._debug:
            facts = attempt_facts(attempt)
            log.debug("attempt ended", **facts, outcome=outcome, run_s=attempt.ran_s)

    def _free(self, attempt: Attempt) -> None:
        """Free the slot; the handler has ended."""
        if attempt.slot_freed:
            return
        attempt.slot_freed = True
        if attempt.timer is not None:
            attempt.end_timer()
        attempt.runner = None
        del self.running[attempt]
        self._slots.give(attempt.source.queue_slots, 1)

    # end from outside ---------------------------------------------------------------------------

    def _arm_all(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            if not attempt.outcome_chosen and attempt.task and attempt.task.kind == "async":
                self._arm(attempt)

    def _arm(self, attempt: Attempt) -> None:
        """Start the timer of its timeout."""
        timeout_s = attempt.task.timeout_s if attempt.task else None
        if timeout_s is not None and not attempt.stop_reason and attempt.timer is None:
            loop = asyncio.get_running_loop()
            attempt.timer = loop.call_later(timeout_s, self.end, attempt, "timeout")

    def end(self, attempt: Attempt, why: StopReason) -> None:
        """Stop an attempt; a later reason changes nothing, unless the lease is lost."""
        if attempt.outcome_chosen or (attempt.stop_reason and why != "lost"):
            return
        was_stopping = attempt.stop_reason != ""
        attempt.stop_reason = why
        self._watch.tell("ended")
        if not attempt.handler_started:  # the handler has not started and will not
            runner = attempt.runner
            self.conclude(attempt)
            self._free(attempt)
            if runner is not None:
                runner.cancel()
            return
        if why == "lost" or (why == "timeout" and _in_thread(attempt)):
            self.conclude(attempt)
        if not was_stopping:
            attempt.end_timer()
            loop = asyncio.get_running_loop()
            attempt.timer = loop.call_later(self._grace_s, self._abandon, attempt)
            if attempt.runner is not None and not _in_thread(attempt):
                attempt.runner.cancel()

    def _abandon(self, attempt: Attempt) -> None:
        attempt.timer = None
        if attempt.slot_freed:
            return
        self.conclude(attempt)
        self._watch.tell("abandoned")
        in_thread = _in_thread(attempt)
        log.error(
            "a handler does not stop; abandoned",
            **attempt_facts(attempt),
            why=attempt.stop_reason,
            slot="taken until its thread returns" if in_thread else "free",
        )
        if not in_thread:
            self._free(attempt)

    def end_unstarted(self) -> None:
        """Hand back the jobs that wait for a thread or a process."""
        for attempt in list(self.running):
            if not attempt.handler_started and attempt.runner is not None:
                self.end(attempt, "shutdown")

    def all_concluded(self) -> asyncio.Event:
        """An event, set when every attempt has its outcome; call it after the last `begin`."""
        self._all_concluded = asyncio.Event()
        self._set_if_concluded(self._all_concluded)
        return self._all_concluded

    def _set_if_concluded(self, event: asyncio.Event) -> None:
        if all(attempt.outcome_chosen for attempt in self.running):
            event.set()


def _in_thread(attempt: Attempt) -> bool:
    return attempt.task is not None and attempt.task.kind == "thread"
