"""Jobs whose task has no handler here: handed back unspent, later and later, and at last failed.

In a rolling deploy, and in a fleet whose workers have different tasks, another worker has the
handler. Each worker counts its own hand-backs of a job, and fails only a job that it has itself
handed back for as long as the limit: what the store counts includes the snoozes of a handler that
polls. A worker that restarts begins anew, so that the job is kept rather too long than too short.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import structlog

from tenure.core.errors import UnknownTask
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome
from tenure.core.retry import failure_of
from tenure.worker.announcing import lease_facts
from tenure.worker.task import Tasks

log = structlog.get_logger("tenure.worker")

_DELAY_MS = 1_000
_DELAY_MS_MAX = 60_000
_STEPS = 10  # a short limit is so many of its first delays
_TIMES_MIN = 4  # hand-backs before a job fails, however slow the store is
_LOG_EVERY_S = 60.0
_NAMES_MAX = 1_000
_JOBS_MAX = 100_000


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


class Unknown:
    """Decides about such jobs for one worker; `limit_ms` is how long they are handed back."""

    def __init__(
        self, tasks: Tasks, *, limit_ms: int, clock: Callable[[], float], rng: Random
    ) -> None:
        self._tasks = tasks
        self._limit_ms = limit_ms
        self._clock = clock
        self._rng = rng
        self._jobs: dict[tuple[str, str], _HandedBack] = {}
        self._said: dict[str, float] = {}

    def judge(self, lease: Lease, say: Callable[[Report], object]) -> Outcome:
        """Back with a delay, or failed; `say` gets a line for the job's log at the first time."""
        now = self._clock()
        name = (lease.queue, lease.job_id)
        # Taken out and put back: the first of the dict is the one not seen for the longest time.
        seen = self._jobs.pop(name, None) or _HandedBack(now)
        failure = failure_of(UnknownTask(self._tasks.nearest(lease.task)), retryable=False)
        handed_back_ms = (now - seen.since_s) * 1000
        if seen.times >= _TIMES_MIN and handed_back_ms >= self._limit_ms:
            self._say(lease, now, delay_ms=0)
            return Outcome(lease, "bury", failure=failure)
        delay_ms = hand_back_ms(seen.times, self._limit_ms)
        delay_ms += round(delay_ms / 4 * self._rng.random())  # so that they do not come in step
        self._say(lease, now, delay_ms=delay_ms)
        if not seen.times:
            text = {"text": f"{failure.message}; the job is handed back"}
            say(Report(lease=lease, type="log", data=msgspec.json.encode(text)))
        seen.times += 1
        if len(self._jobs) >= _JOBS_MAX:
            del self._jobs[next(iter(self._jobs))]
        self._jobs[name] = seen
        return Outcome(lease, "snooze", delay_ms=delay_ms)

    def _say(self, lease: Lease, now: float, *, delay_ms: int) -> None:
        said = self._said.get(lease.task)
        if said is None or now - said >= _LOG_EVERY_S:  # of one name once a minute
            if len(self._said) >= _NAMES_MAX:
                self._said.clear()
            self._said[lease.task] = now
            log.warning(
                "task_unknown",
                **lease_facts(lease),
                nearest=self._tasks.close(lease.task),
                handed_back_ms=delay_ms,
            )
