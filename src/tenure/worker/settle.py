"""Outcomes of handlers, and how they are sent: group commit.

What finishes while one call is in flight is sent together in the next one. An idle `Flusher` sends
at once; under load its batches grow up to a limit. If the store works on several batches at once, a
full batch need not wait for the one before it. An item is done when the store has answered it:

    unreachable, reply lost  the same batch is sent again after a jittered pause, until each lease's
                             local deadline has passed; then the item is dropped as lost
    store answers an error   the batch is bisected until the poisoned items are alone, so that the
                             others pass; they are tried a few more times, then dropped: the lease
                             expires and the store's rule for expired leases applies
    UsageError               an outcome that is refused twice is replaced by one that fails the job
                             with that reason
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import msgspec
import structlog

from tenure.core.encoding import REPLACED, storable_json, whole_text, without_nul
from tenure.core.errors import (
    LeaseLost,
    RemoteTraceback,
    ReplyLost,
    StoreError,
    StoreUnreachable,
    TenureError,
    UnknownTask,
    UsageError,
)
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Cancel, Failure, Outcome, Park, RateLimit, Snooze
from tenure.core.retry import RetryPolicy, delay_ms, failure_of
from tenure.worker.config import Settings
from tenure.worker.job import Attempt, attempt_facts
from tenure.worker.task import Tasks

log = structlog.get_logger("tenure.worker")

_MESSAGE_CHARS_MAX = 2_000
_REFUSED = "outcome_refused"
# Jobs without a handler here: delays between hand-backs, and limits of the memory for them.
_DELAY_MS = 1_000
_DELAY_MS_MAX = 60_000
_LAST_MS = 2_000  # before a job expires; some stores promote due jobs once a second
_STEPS = 10  # the first delay is at most a tenth of the limit
_TIMES_MIN = 4  # hand-backs before a job fails, however slow the store is
_LOG_EVERY_S = 60.0
_NAMES_MAX = 100
_JOBS_MAX = 100_000


class TimedOut(TenureError):
    """The handler took longer than its task allows."""

    code = "timeout"


class ProcessDied(TenureError):
    """The child process ended before the handler did: killed, out of memory, or a crash."""

    code = "process_died"


class HandlerFailed(TenureError):
    """A handler failed in its child process, where its error stays; `outcome` says how.

    Its traceback is the `__cause__`, as text.
    """

    def __init__(self, outcome: Outcome) -> None:
        failure = outcome.failure or Failure(code=outcome.kind, message="")
        super().__init__(failure.message)
        self.outcome = outcome
        self.code = failure.code
        if failure.stack:
            self.__cause__ = RemoteTraceback(failure.stack)


def error_of(outcome: Outcome) -> Exception:
    """What a handler raised in its child process: the same signal, else `HandlerFailed`."""
    after_s = outcome.delay_ms / 1000
    match outcome.kind, outcome.until:
        case "snooze", "rate_limit":
            return RateLimit(after_s)
        case "snooze", "children":
            return Park()
        case "snooze", _:
            return Snooze(after_s)
        case "cancel", _:
            return Cancel(outcome.failure.message if outcome.failure is not None else "")
        case "release", _:
            return LeaseLost(outcome.lease.job_id, "this attempt is over")
        case _:
            return HandlerFailed(outcome)


def completed_outcome(lease: Lease, value: Any, report: Callable[[Report], Any]) -> Outcome:
    """The outcome of a handler that returned.

    A value that cannot be stored buries the job: another attempt would return the same. If
    characters of the result were replaced, `report` gets a line for the job's log.
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
    """The outcome for a store that refuses NUL; the same object if it has none."""
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


def refused_outcome(outcome: Outcome, error: Exception) -> Outcome | None:
    """The outcome to send instead of one that the store refuses; None: drop it.

    An error of the store may pass with time. Then the lease expires, and the job runs again.
    """
    already = outcome.failure is not None and outcome.failure.code == _REFUSED
    if already or isinstance(error, StoreError):
        return None
    return _bury(outcome.lease, _REFUSED, f"the store refuses the outcome: {error}")


def _bury(lease: Lease, code: str, message: str) -> Outcome:
    text = whole_text(message[:_MESSAGE_CHARS_MAX])
    return Outcome(lease, "bury", failure=Failure(code=code, message=text, retryable=False))


def with_custom_backoff(attempt: Attempt, outcome: Outcome, error: BaseException) -> Outcome:
    """The outcome by the task's backoff function, if the job names a backoff that its queue lacks.

    The function returns the delay, or -1 to give the job up. If it raises, the job is given up too.
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


def no_children_outcome(lease: Lease) -> Outcome:
    """The handler parked its job in a queue whose jobs have no children."""
    message = "the handler parked its job, but jobs of this queue have no children to wait for"
    return _bury(lease, "no_children", message)


def cancelled_outcome(lease: Lease) -> Outcome:
    """A cancel was requested, and the handler has been stopped."""
    failure = Failure(code="cancelled", message="cancelled on request")
    return Outcome(lease, "cancel", failure=failure)


def hand_back_ms(times: int, limit_ms: int, left_ms: int | None = None) -> int:
    """The delay of a job that was handed back this many times before.

    If it expires in `left_ms`, it comes back once more shortly before that; 0: it cannot.

    >>> [hand_back_ms(times, 3_600_000) for times in (0, 1, 5, 6, 1_000)]
    [1000, 2000, 32000, 60000, 60000]
    >>> [hand_back_ms(4, 60_000, left_ms) for left_ms in (40_000, 9_000, 1_900, -5)]
    [16000, 7000, 0, 0]
    """
    first_ms = max(1, min(_DELAY_MS, limit_ms // _STEPS))
    delay_ms = min(first_ms << min(times, 16), _DELAY_MS_MAX)
    if left_ms is None:
        return delay_ms
    last_ms = min(_LAST_MS, limit_ms * 4 // _STEPS)
    return 0 if left_ms < last_ms else max(1, min(delay_ms, left_ms - last_ms))


class _HandedBack(msgspec.Struct):
    """One job: when this worker handed it back first, and how often."""

    since_s: float
    times: int = 0


class UnknownTasks:
    """Jobs whose task has no handler here: handed back with growing delays, and at last failed.

    In a rolling deploy, or if workers have different tasks, another worker has the handler. Each
    worker counts its own hand-backs, because the store's count includes the snoozes of handlers,
    and fails only a job that it has itself handed back for `limit_ms`. A worker that restarts
    begins anew, so a job may be kept longer than that. A job with a time to live that was never
    started fails before that ends: then the store would end it, without a reason.
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

    def decide_outcome(self, attempt: Attempt, report: Callable[[Report], object]) -> Outcome:
        """Hand the job back with a delay, or fail it; the first time the job's log says so."""
        now, lease = self._clock(), attempt.lease
        name = (lease.queue, lease.job_id)
        # Taken out and put back, so that the first entry of the dict is the oldest.
        seen = self._jobs.pop(name, None) or _HandedBack(now)
        delay_ms = self._delay_ms(lease, seen, now)
        logged = self._log(attempt, now, delay_ms=delay_ms)
        if not delay_ms:
            failure = failure_of(UnknownTask(self._tasks.nearest(lease.task)), retryable=False)
            return Outcome(lease, "bury", failure=failure)
        if not seen.times:
            # To find the nearest name takes milliseconds, so not for every job.
            why = self._tasks.nearest(lease.task) if logged else f"no handler for {lease.task!r}"
            report(_log_line(lease, f"{why}; the job is handed back"))
        seen.times += 1
        if len(self._jobs) >= _JOBS_MAX:
            del self._jobs[next(iter(self._jobs))]
        self._jobs[name] = seen
        return Outcome(lease, "snooze", delay_ms=delay_ms)

    def _delay_ms(self, lease: Lease, seen: _HandedBack, now: float) -> int:
        """How long it waits for another worker; 0 if its time is over."""
        if lease.ttl_ms and lease.attempt <= 1:  # it counts until the first start
            claimed_ms = lease.lease_until_ms - lease.lease_ms
            left_ms = lease.created_ms + lease.ttl_ms - claimed_ms
            return hand_back_ms(seen.times, lease.ttl_ms, left_ms)
        if seen.times >= _TIMES_MIN and (now - seen.since_s) * 1000 >= self._limit_ms:
            return 0
        delay_ms = hand_back_ms(seen.times, self._limit_ms)
        return delay_ms + round(delay_ms / 4 * self._rng.random())  # jitter

    def _log(self, attempt: Attempt, now: float, *, delay_ms: int) -> bool:
        """Once a minute for each name, and for so many names: submitters choose them.

        Whether it was logged.
        """
        lease, logged = attempt.lease, self._logged
        if now - logged.get(lease.task, -_LOG_EVERY_S) < _LOG_EVERY_S:
            return False
        logged.pop(lease.task, None)
        if len(logged) >= _NAMES_MAX:
            oldest = next(iter(logged))
            if now - logged[oldest] < _LOG_EVERY_S:
                return False
            del logged[oldest]
        logged[lease.task] = now
        log.warning(
            "task_unknown",
            **attempt_facts(attempt),
            nearest=self._tasks.close(lease.task),
            handed_back_ms=delay_ms,
        )
        return True


_USAGE_TRIES = 2  # a UsageError is final when it is repeated


class Backoff:
    """Jittered pauses between tries; each is longer than the one before, until `reset`."""

    def __init__(self, rng: Random, first_ms: int, ms_max: int) -> None:
        self._rng = rng
        self._policy = RetryPolicy(delay_ms=first_ms, delay_ms_max=ms_max, jitter="equal")
        self.tries = 0

    def pause_s(self) -> float:
        """How long to wait before the next try."""
        self.tries += 1
        return delay_ms(self._policy, self.tries, self._rng.random()) / 1000

    def reset(self) -> None:
        """Begin with the shortest pause again, after a success."""
        self.tries = 0


class Entry(msgspec.Struct, eq=False):
    """One report or outcome to send. The sender of a report waits for `written`."""

    attempt: Attempt
    item: Any
    written: asyncio.Future[None] | None = None
    tries: int = 0


class Flusher:
    """Sends items of one kind to one queue in batches, at most one call at a time by each sender.

    There are as many senders as `backoffs`. All but the first send full batches only: a partial
    batch waits, so that it grows.

    The callbacks run in the worker's loop. `answered` gets a batch and the store's answers,
    `failed` the error of a call. `dropped` gets entries whose deadline passed (`LeaseLost`) or
    which the store keeps refusing, unless `replacement` returns another item to send in its place.
    """

    def __init__(
        self,
        send: Callable[[list[Any]], Awaitable[list[Any]]],
        *,
        answered: Callable[[Sequence[Entry], Sequence[Any]], None],
        dropped: Callable[[Entry, Exception], None],
        failed: Callable[[BaseException], None],
        replacement: Callable[[Any, Exception], Any] = lambda _item, _error: None,
        clock: Callable[[], float],
        backoffs: Sequence[Backoff],
        settings: Settings,
    ) -> None:
        self._send = send
        self._answered = answered
        self._dropped = dropped
        self._failed = failed
        self._replacement = replacement
        self._clock = clock
        self._backoffs = backoffs
        self._batch_max = settings.settle_batch_max
        self._tries_max = settings.settle_tries_max
        self._waiting: list[Entry] = []
        self._in_flight = 0
        self._ended = False
        self._wake: asyncio.Future[None] | None = None
        self._wake_full: list[asyncio.Future[None]] = []
        self._emptied: list[asyncio.Future[None]] = []

    @property
    def backlog(self) -> int:
        """How many items have no answer yet."""
        return len(self._waiting) + self._in_flight

    @property
    def is_retrying(self) -> bool:
        """Whether the last try of a sender failed and another one is due."""
        return any(backoff.tries > 0 for backoff in self._backoffs)

    def add(self, entry: Entry) -> None:
        """Send it with the next batch: now, if none is in flight."""
        self._waiting.append(entry)
        if self._wake is not None:
            self._wake.set_result(None)
            self._wake = None
        elif self._wake_full and len(self._waiting) >= self._batch_max:
            self._wake_full.pop().set_result(None)

    async def run(self) -> None:
        """Flush until cancelled; leases of unanswered items then expire."""
        first, *others = self._backoffs
        loops = [self._send_batches(first, self._wait_for_item)]
        loops += [self._send_batches(each, self._wait_for_full_batch) for each in others]
        senders = [asyncio.ensure_future(loop) for loop in loops]
        try:
            await asyncio.gather(*senders)
        finally:
            for sender in senders:
                sender.cancel()
            self._wake, self._wake_full = None, []
            self._ended = True
            self._signal_empty()  # end the waits of `empty`

    async def _send_batches(self, backoff: Backoff, wait: Callable[[], Awaitable[None]]) -> None:
        while True:
            await wait()
            batch = self._waiting[: self._batch_max]
            del self._waiting[: self._batch_max]
            self._in_flight += len(batch)
            while batch:
                sent = len(batch)
                batch = await self._attempt(self._still_ours(batch))
                self._in_flight -= sent - len(batch)
                if batch:
                    await asyncio.sleep(backoff.pause_s())
            backoff.reset()
            if not self.backlog:
                self._signal_empty()

    async def _wait_for_item(self) -> None:
        if not self._waiting:
            self._wake = asyncio.get_running_loop().create_future()
            # The first item wakes it, but it runs after all others of this turn of the loop: so
            # they make one batch.
            await self._wake

    async def _wait_for_full_batch(self) -> None:
        while len(self._waiting) < self._batch_max:
            wake = asyncio.get_running_loop().create_future()
            self._wake_full.append(wake)
            await wake

    async def empty(self) -> bool:
        """Wait until every item has its answer; False if this flusher ended before."""
        if self.backlog and not self._ended:
            waiter = asyncio.get_running_loop().create_future()
            self._emptied.append(waiter)
            await waiter
        return not self.backlog

    async def _attempt(self, batch: list[Entry]) -> list[Entry]:
        """Send a batch and deliver its answers; returns the entries to send again."""
        if not batch:
            return []
        try:
            answers = await self._send([entry.item for entry in batch])
            if len(answers) != len(batch):
                raise RuntimeError(f"{len(answers)} answers to a batch of {len(batch)}")
        except (StoreUnreachable, ReplyLost) as error:
            self._failed(error)
            return batch
        except Exception as error:
            self._failed(error)
            return await self._isolate(batch, error)
        self._answered(batch, answers)
        return []

    async def _isolate(self, batch: list[Entry], error: Exception) -> list[Entry]:
        if len(batch) > 1:
            half = len(batch) // 2
            again = await self._attempt(self._still_ours(batch[:half]))
            return again + await self._attempt(self._still_ours(batch[half:]))
        entry = batch[0]
        entry.tries += 1
        if entry.tries >= (_USAGE_TRIES if isinstance(error, UsageError) else self._tries_max):
            lease = entry.attempt.lease
            log.error(
                "the store refuses an item; it is given up",
                job_id=lease.job_id,
                queue=lease.queue,
                error=repr(error),
                tries=entry.tries,
            )
            entry.item, entry.tries = self._replacement(entry.item, error), 0
            if entry.item is not None:
                entry.attempt.outcome = entry.item
                return batch
            self._dropped(entry, error)
            return []
        return batch

    def _still_ours(self, batch: list[Entry]) -> list[Entry]:
        """The batch without entries whose lease another worker may hold by now."""
        now = self._clock()
        ours: list[Entry] = []
        for entry in batch:
            if entry.attempt.until > now:
                ours.append(entry)
            else:
                lost = LeaseLost(entry.attempt.lease.job_id, "it ran out before the store answered")
                self._dropped(entry, lost)
        return ours

    def _signal_empty(self) -> None:
        for waiter in self._emptied:
            if not waiter.done():
                waiter.set_result(None)
        self._emptied.clear()
