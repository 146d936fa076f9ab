"""Jobs whose task has no handler here: handed back unspent, later and later, and at last failed.

In a rolling deploy, and in a fleet whose workers have different tasks, another worker has the
handler. How often a job was put off is in the store, as the part of its fence that no attempt
accounts for, so that the count outlives every worker; a `Snooze` of its handler counts too. The
job fails when its delays add up to the limit, it is older than the limit, and this worker has
missed the handler for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import structlog

from leasehold.core.errors import UnknownTask
from leasehold.core.lease import Lease, Report
from leasehold.core.outcome import Outcome
from leasehold.core.retry import failure_of
from leasehold.worker.announcing import lease_facts
from leasehold.worker.task import Tasks

log = structlog.get_logger("leasehold.worker")

_DELAY_MS = 1_000
_DELAY_MS_MAX = 60_000
_STEPS = 10  # at least so many hand-backs fit into a short limit
_LOG_EVERY_S = 60.0
_NAMES_MAX = 1_000


def hand_back_ms(times: int, limit_ms: int) -> int:
    """How long a job waits that was handed back so many times before.

    >>> [hand_back_ms(times, 3_600_000) for times in (0, 1, 5, 6, 1_000)]
    [1000, 2000, 32000, 60000, 60000]
    """
    first_ms = max(1, min(_DELAY_MS, limit_ms // _STEPS))
    return min(first_ms << min(times, 16), _DELAY_MS_MAX)


def waited_ms(times: int, limit_ms: int) -> int:
    """How long so many hand-backs have put a job off, at least.

    >>> waited_ms(2, 3_600_000), waited_ms(66, 3_600_000)
    (3000, 3663000)
    """
    growing = sum(hand_back_ms(n, limit_ms) for n in range(min(times, 16)))
    return growing + max(0, times - 16) * _DELAY_MS_MAX


class Unknown:
    """Decides about such jobs for one worker; `limit_ms` is how long they are handed back."""

    def __init__(
        self, tasks: Tasks, *, limit_ms: int, clock: Callable[[], float], rng: Random
    ) -> None:
        self._tasks = tasks
        self._limit_ms = limit_ms
        self._clock = clock
        self._rng = rng
        self._met: dict[str, float] = {}
        self._said: dict[str, float] = {}

    def judge(self, lease: Lease, say: Callable[[Report], object]) -> Outcome:
        """Back with a delay, or failed; `say` gets a line for the job's log at the first time."""
        now = self._clock()
        if len(self._met) >= _NAMES_MAX:
            self._met.clear()
            self._said.clear()
        missed_s = now - self._met.setdefault(lease.task, now)
        times = max(0, lease.fence - lease.attempt)
        failure = failure_of(UnknownTask(self._tasks.nearest(lease.task)), retryable=False)
        if self._is_over(lease, times, missed_s):
            self._say(lease, now, delay_ms=0)
            return Outcome(lease, "bury", failure=failure)
        delay_ms = hand_back_ms(times, self._limit_ms)
        delay_ms += round(delay_ms / 4 * self._rng.random())  # so that they do not come in step
        self._say(lease, now, delay_ms=delay_ms)
        if not times:
            text = {"text": f"{failure.message}; the job is handed back"}
            say(Report(lease=lease, type="log", data=msgspec.json.encode(text)))
        return Outcome(lease, "snooze", delay_ms=delay_ms)

    def _is_over(self, lease: Lease, times: int, missed_s: float) -> bool:
        claimed_ms = lease.lease_until_ms - lease.lease_ms  # both on the store's clock
        age_ms = claimed_ms - lease.created_ms if lease.created_ms else self._limit_ms
        return (
            waited_ms(times, self._limit_ms) >= self._limit_ms
            and age_ms >= self._limit_ms
            and missed_s * 1000 >= min(self._limit_ms, _DELAY_MS_MAX)
        )

    def _say(self, lease: Lease, now: float, *, delay_ms: int) -> None:
        said = self._said.get(lease.task)
        if said is None or now - said >= _LOG_EVERY_S:  # of one name once a minute
            self._said[lease.task] = now
            log.warning(
                "task_unknown",
                **lease_facts(lease),
                nearest=self._tasks.close(lease.task),
                handed_back_ms=delay_ms,
            )
