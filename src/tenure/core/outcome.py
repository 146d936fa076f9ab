"""How an attempt ends: what the worker asks for (`Outcome`), what the store decided (`Verdict`),
and the signals by which a handler chooses (`Retry`, `Fatal`, `Snooze`, `Cancel`, `RateLimit`,
`Park`).
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
release: handed back unfinished (shutdown); anyone may claim it at once, this attempt not counted.
cancel: ended on request.
"""

Until = Literal["", "rest", "children"]
"""What a snoozed job waits for besides its delay, in queues that know it:
rest: the whole queue rests for `delay_ms`; any other queue lets this one job wait.
children: those that the job added have ended; only for queues that say so (`has_children`).
"""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of an error: enough to group and to understand it, nothing executable."""

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
    """The job waits again as if this claim had not been."""


class Cancelled(msgspec.Struct, frozen=True):
    """The job is ended without a result on request."""


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
    """Root of what a handler raises to choose how its attempt ends.

    `code` is the word under which the failure is kept and grouped; empty means the signal's name.
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
    """Something behind the handler asks to be left alone for `after` seconds: no job of this queue
    starts before, where the queue has a rate limiter; this one does not in any case. This attempt
    is not counted."""

    def __init__(self, after: float | timedelta, reason: str = "") -> None:
        super().__init__(reason or "the handler asked for a rest")
        self.after_ms = _ms(after) or 0


class Park(Signal):
    """Wait for the children that this job added while it ran, then run it again; this attempt is
    not counted. Children that have all ended by then do not keep it waiting."""


def _ms(after: float | timedelta | None) -> int | None:
    if after is None:
        return None
    seconds = after.total_seconds() if isinstance(after, timedelta) else after
    if seconds < 0:
        raise ValueError(f"a delay cannot be negative: {seconds} s")
    return round(seconds * 1000)
