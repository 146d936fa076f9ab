"""What the end of a handler becomes: the worker's own part of judging.

Which failures are tried again is decided by `core.retry.judge`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import structlog

from tenure.core.encoding import REPLACED, storable_json, whole_text, without_nul
from tenure.core.errors import StoreError, TenureError, UnknownTask
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Failure, Outcome
from tenure.core.retry import failure_of
from tenure.worker.job import Attempt, lease_facts
from tenure.worker.task import Tasks

log = structlog.get_logger("tenure.worker")

_MESSAGE_CHARS_MAX = 2_000
_REFUSED = "outcome_refused"
# Jobs without a handler here: delays between hand-backs, and bounds of what is remembered of them.
_DELAY_MS = 1_000
_DELAY_MS_MAX = 60_000
_STEPS = 10  # a short limit is so many of its first delays
_TIMES_MIN = 4  # hand-backs before a job fails, however slow the store is
_LOG_EVERY_S = 60.0
_NAMES_MAX = 1_000
_JOBS_MAX = 100_000


class TimedOut(TenureError):
    """The handler took longer than its task allows."""

    code = "timeout"


class ProcessDied(TenureError):
    """The child process ended before the handler did: killed, out of memory, or a crash."""

    code = "process_died"


def completed(lease: Lease, value: Any, report: Callable[[Report], Any]) -> Outcome:
    """The outcome of a handler that returned.

    A value that cannot be stored buries the job: the work is done, and doing it again would end the
    same way. Where characters of the result were replaced, `report` gets a line for the job's log.
    """
    if value is None:
        return Outcome(lease, "complete")
    try:
        result, replaced = storable_json(value)
    except (TypeError, ValueError, OverflowError) as error:
        why = f"the handler returned {type(value).__name__}, which cannot be stored: {error}"
        return _bury(lease, "result_not_json", why)
    if replaced:
        report(replaced_note(lease))
    return Outcome(lease, "complete", result)


def replaced_note(lease: Lease) -> Report:
    """A line for the job's log: the result is not exactly what the handler returned."""
    return _log_line(lease, f"in the result, {REPLACED}")


def _log_line(lease: Lease, text: str) -> Report:
    return Report(lease=lease, type="log", data=msgspec.json.encode({"text": text}))


def nul_free(outcome: Outcome) -> Outcome:
    """The outcome for a store that refuses NUL; the same object where it has none."""
    result, failure = without_nul(outcome.result), outcome.failure
    if failure is not None and "\0" in failure.code + failure.message + failure.stack:
        failure = msgspec.structs.replace(
            failure,
            code=_no_nul(failure.code),
            message=_no_nul(f"{failure.message} ({REPLACED})"),
            stack=_no_nul(failure.stack),
        )
    if result is outcome.result and failure is outcome.failure:
        return outcome
    return msgspec.structs.replace(outcome, result=result, failure=failure)


def nul_free_report(report: Report) -> Report:
    """The same for a report."""
    return msgspec.structs.replace(
        report,
        type=_no_nul(report.type),
        step=_no_nul(report.step),
        data=without_nul(report.data),
        progress=without_nul(report.progress),
    )


def _no_nul(text: str) -> str:
    return text.replace("\0", "\ufffd")


def refused(outcome: Outcome, error: Exception) -> Outcome | None:
    """What is sent instead of an outcome that the store will never take.

    An error that the store answered may pass with time: then the lease is left to run out, and the
    job runs again.
    """
    already = outcome.failure is not None and outcome.failure.code == _REFUSED
    if already or isinstance(error, StoreError):
        return None
    return _bury(outcome.lease, _REFUSED, f"the store refuses the outcome: {error}")


def _bury(lease: Lease, code: str, message: str) -> Outcome:
    text = whole_text(message[:_MESSAGE_CHARS_MAX])
    return Outcome(lease, "bury", failure=Failure(code=code, message=text, retryable=False))


def backed_off(attempt: Attempt, outcome: Outcome, error: BaseException) -> Outcome:
    """Ask the task's function when the job names a backoff that its queue does not know.

    It returns how long to wait, or -1 to give the job up. A function that raises gives it up too.
    """
    lease, task = outcome.lease, attempt.task
    custom_backoff = attempt.source.features.custom_backoff
    named = custom_backoff(lease) if custom_backoff is not None else None
    if named is None or task is None or task.backoff is None:
        return outcome
    if lease.attempt >= (lease.max_attempts or 1):
        return outcome
    kind, attempts_made = named
    try:
        delay_ms = int(task.backoff(attempts_made, kind, error, attempt.job))
    except Exception as broken:
        return Outcome(lease, "bury", failure=failure_of(broken, retryable=False))
    if delay_ms < 0:
        return Outcome(lease, "bury", failure=outcome.failure)
    return Outcome(lease, "retry", failure=outcome.failure, delay_ms=delay_ms)


def childless(lease: Lease) -> Outcome:
    """The handler wants to wait for children in a queue whose jobs have none."""
    message = "the handler parked its job, but jobs of this queue have no children to wait for"
    return _bury(lease, "no_children", message)


def cancelled(lease: Lease) -> Outcome:
    """A cancel was requested, and the handler has been stopped."""
    failure = Failure(code="cancelled", message="cancelled on request")
    return Outcome(lease, "cancel", failure=failure)


def hand_back_ms(times: int, limit_ms: int) -> int:
    """How long a job waits that was handed back so many times before.

    >>> [hand_back_ms(times, 3_600_000) for times in (0, 1, 5, 6, 1_000)]
    [1000, 2000, 32000, 60000, 60000]
    """
    first_ms = max(1, min(_DELAY_MS, limit_ms // _STEPS))
    return min(first_ms << min(times, 16), _DELAY_MS_MAX)


class _HandedBack(msgspec.Struct):
    """One job: when this worker handed it back first, and how often."""

    since_s: float
    times: int = 0


class UnknownTasks:
    """Jobs whose task has no handler here: handed back, later and later, and at last failed.

    In a rolling deploy, and in a fleet whose workers have different tasks, another worker has the
    handler. Each worker counts its own hand-backs of a job and fails only a job that it has itself
    handed back for `limit_ms`: the store's count includes the snoozes of a handler that polls. A
    worker that restarts begins anew, so a job is kept rather too long than too short.
    """

    def __init__(
        self, tasks: Tasks, *, limit_ms: int, clock: Callable[[], float], rng: Random
    ) -> None:
        self._tasks = tasks
        self._limit_ms = limit_ms
        self._clock = clock
        self._rng = rng
        self._jobs: dict[tuple[str, str], _HandedBack] = {}
        self._logged: dict[str, float] = {}

    def judge(self, lease: Lease, report: Callable[[Report], object]) -> Outcome:
        """Hand the job back with a delay, or fail it; the first time the job's log says so."""
        now = self._clock()
        name = (lease.queue, lease.job_id)
        # Taken out and put back: the first of the dict is the one not seen for the longest time.
        seen = self._jobs.pop(name, None) or _HandedBack(now)
        failure = failure_of(UnknownTask(self._tasks.nearest(lease.task)), retryable=False)
        if seen.times >= _TIMES_MIN and (now - seen.since_s) * 1000 >= self._limit_ms:
            self._log(lease, now, delay_ms=0)
            return Outcome(lease, "bury", failure=failure)
        delay_ms = hand_back_ms(seen.times, self._limit_ms)
        delay_ms += round(delay_ms / 4 * self._rng.random())  # so that they do not come in step
        self._log(lease, now, delay_ms=delay_ms)
        if not seen.times:
            report(_log_line(lease, f"{failure.message}; the job is handed back"))
        seen.times += 1
        if len(self._jobs) >= _JOBS_MAX:
            del self._jobs[next(iter(self._jobs))]
        self._jobs[name] = seen
        return Outcome(lease, "snooze", delay_ms=delay_ms)

    def _log(self, lease: Lease, now: float, *, delay_ms: int) -> None:
        """Once a minute for each name."""
        if now - self._logged.get(lease.task, -_LOG_EVERY_S) < _LOG_EVERY_S:
            return
        if len(self._logged) >= _NAMES_MAX:
            self._logged.clear()
        self._logged[lease.task] = now
        log.warning(
            "task_unknown",
            **lease_facts(lease),
            nearest=self._tasks.close(lease.task),
            handed_back_ms=delay_ms,
        )
