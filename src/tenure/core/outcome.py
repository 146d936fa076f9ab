"""How an attempt ends: what the worker asks for (`Outcome`), what the store decided (`Verdict`).

A handler chooses by raising a signal: `Retry`, `Fatal`, `Snooze`, `Cancel`, `RateLimit`, `Park`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, TypeAlias

import msgspec

from tenure.core.errors import LeaseLost
from tenure.core.lease import Lease

OutcomeKind = Literal["complete", "fail", "retry", "bury", "snooze", "release", "cancel"]
"""complete: done, with a result.
fail: it failed and the job's own options in the store decide whether it runs again.
retry: it failed and shall run again after `delay_ms`; the store buries it if no attempt is left.
bury: it failed for good.
snooze: not a failure; run it again after `delay_ms` without counting this attempt.
release: handed back unfinished (shutdown) and claimable at once; this attempt is not counted.
cancel: ended on request.
"""

Until = Literal["", "rate_limit", "children"]
"""What a snoozed job waits for besides its delay:
rate_limit: no job of the queue starts for `delay_ms`; without a rate limiter only this job waits.
children: the jobs that it added have ended; only for queues with the feature `children`.
"""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of an error, enough to group and to understand it."""

    code: str
    message: str
    stack: str = ""
    retryable: bool = True


class Outcome(msgspec.Struct, frozen=True):
    """What a worker asks the store to make of a lease. `result` is JSON, `until` for a snooze."""

    lease: Lease
    kind: OutcomeKind
    result: bytes = b"null"
    failure: Failure | None = None
    delay_ms: int = 0
    until: Until = ""


class Completed(msgspec.Struct, frozen=True):
    """The result is stored; the job is finished."""


class Retried(msgspec.Struct, frozen=True):
    """The job waits again and may be claimed from `due_ms` on (store clock; 0 means at once)."""

    due_ms: int = 0


class Buried(msgspec.Struct, frozen=True):
    """The job has failed for good."""


class Released(msgspec.Struct, frozen=True):
    """The job waits again as if it had not been claimed."""


class Cancelled(msgspec.Struct, frozen=True):
    """The job was ended without a result, on request."""


Verdict: TypeAlias = Completed | Retried | Buried | Released | Cancelled | LeaseLost

COMPLETED = Completed()
BURIED = Buried()
RELEASED = Released()
CANCELLED = Cancelled()

VERDICT_NAMES: dict[type, str] = {
    Completed: "completed",
    Retried: "retried",
    Buried: "buried",
    Released: "released",
    Cancelled: "cancelled",
    LeaseLost: "lost",
}
"""The names of verdicts in metrics, logs and the answers of a plane."""

_VERDICTS: dict[str, Verdict] = {
    "complete": COMPLETED,
    "bury": BURIED,
    "release": RELEASED,
    "cancel": CANCELLED,
}
_VERDICTS |= {VERDICT_NAMES[type(verdict)]: verdict for verdict in _VERDICTS.values()}


def verdict_of(word: str, due_ms: int = 0) -> Verdict:
    """The verdict by its name, or by the kind of outcome that a store decided on."""
    if word in ("retry", "snooze", "retried"):
        return Retried(due_ms)
    return _VERDICTS[word]


class Signal(Exception):
    """Root of the exceptions by which a handler chooses how its attempt ends.

    `code` is stored with the failure and groups it; empty means the name of the signal.
    """

    code = ""


class Retry(Signal):
    """Run the job again, after `after` seconds (or a timedelta) or by the task's policy if None."""

    def __init__(
        self, after: float | timedelta | None = None, reason: str = "", *, code: str = ""
    ) -> None:
        super().__init__(reason or "the handler asked for a retry")
        self.after_ms = _ms(after)
        self.code = code


class Fatal(Signal):
    """Trying again is useless: bury the job now."""

    def __init__(self, reason: str = "", *, code: str = "") -> None:
        super().__init__(reason or "the handler gave the job up")
        self.code = code


class Snooze(Signal):
    """Not now: run the job again after `after` seconds without counting this attempt."""

    def __init__(self, after: float | timedelta, reason: str = "") -> None:
        super().__init__(reason or "the handler snoozed the job")
        self.after_ms = _ms(after) or 0


class Cancel(Signal):
    """End the job as cancelled."""


class RateLimit(Signal):
    """A service that the handler calls asked for a pause of `after` seconds.

    If the queue has a rate limiter, none of its jobs starts before; else only this job waits. This
    attempt is not counted.
    """

    def __init__(self, after: float | timedelta, reason: str = "") -> None:
        super().__init__(reason or "the handler asked for a rest")
        self.after_ms = _ms(after) or 0


class Park(Signal):
    """Wait for the children that this job added while it ran, then run it again.

    If all children have ended already, it runs again at once. This attempt is not counted.
    """


def _ms(after: float | timedelta | None) -> int | None:
    if after is None:
        return None
    seconds = after.total_seconds() if isinstance(after, timedelta) else after
    if seconds < 0:
        raise ValueError(f"a delay cannot be negative: {seconds} s")
    return round(seconds * 1000)
