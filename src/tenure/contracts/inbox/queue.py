"""The inbox and the outbox as queues, their URL options, and when a failed attempt runs again.

The code of a failure decides (inbox contract, section 5). A code that is, or ends in, an HTTP
status (`503`, `http_503`) is in the class of that status:

    busy        423, 500, 502, 503, 504     exponential backoff with jitter
    throttled   429                         the same with a longer first delay
    refused     401, 403                    credentials: the worker refreshes them and counts the
                                            refreshes; here the job is retried like `busy`
    hopeless    every other 4xx             a dead letter: a retry would not help

Any other failure says itself whether it is retryable.
"""

from __future__ import annotations

import random
import re
from typing import Literal

import msgspec

from tenure.contracts.inbox import MACHINE
from tenure.core.errors import UsageError
from tenure.core.outcome import Failure, Outcome
from tenure.core.registry import check_least
from tenure.core.retry import delay_ms, exponential
from tenure.sql.engine import INBOX, OUTBOX, Engine, QueueSettings, SqlOptions
from tenure.sql.sql_queue import SqlQueue

_CONTRACT = "inbox"

# Inbox contract, section 12.
_OUTBOX_BATCH = 10
_OUTBOX_BATCH_MAX = 25
_RetryClass = Literal["busy", "throttled", "refused", "hopeless", "plain"]

_BUSY = frozenset({423, 500, 502, 503, 504})
_THROTTLED = frozenset({429})
_REFUSED = frozenset({401, 403})
THROTTLED_FACTOR = 8

_STATUS = re.compile(r"(?:^|[^0-9])([1-5][0-9]{2})$")


class Options(SqlOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the queue URL; the defaults are for work that must not be lost.

    `box=outbox` opens the second queue, of events to be delivered. `queue` names one of several
    inboxes of a database. `batch` is how many events one claim of an outbox takes, `at_once` how
    many jobs of this queue one worker holds (0: as many as it has slots). `share` is how many jobs
    of one requester a worker of an inbox holds at once, `requester_max` how many all workers do,
    unless the requester's key has a quota; `share=0` switches both off. `keep_credentials` keeps
    the sealed credentials of ended jobs, so that dead letters can be retried with them; without it
    the step that ends a job removes them.
    """

    queue: str = "inbox"
    box: Literal["inbox", "outbox"] = "inbox"
    batch: int = _OUTBOX_BATCH
    at_once: int = 0
    share: int = 0
    requester_max: int = 0
    keep_credentials: bool = False

    def __post_init__(self) -> None:
        self.check(_CONTRACT)
        if not 1 <= self.batch <= _OUTBOX_BATCH_MAX:
            raise UsageError(
                f"batch: 1 to {_OUTBOX_BATCH_MAX} events, not {self.batch}", contract=_CONTRACT
            )
        check_least(self, _CONTRACT, at_once=0, share=0, requester_max=0)
        if not self.queue or len(self.queue) > 100 or not self.queue.isprintable():
            raise UsageError("queue: 1 to 100 printable characters", contract=_CONTRACT)

    def settings(self) -> QueueSettings:
        """The settings of the queue."""
        if self.box == "outbox":
            return self.of_table(contract=_CONTRACT, table=OUTBOX, queue=f"{self.queue}/outbox")
        made = self.of_table(contract=_CONTRACT, table=INBOX, queue=self.queue)
        own = ("keep_credentials", "share", "requester_max")
        return msgspec.structs.replace(made, **{name: getattr(self, name) for name in own})


def _http_status(code: str) -> int:
    """The HTTP status that an error code ends in, 0 for none.

    >>> [_http_status(code) for code in ("http_503", "404", "Timeout", "E1503")]
    [503, 404, 0, 0]
    """
    match = _STATUS.search(code)
    return int(match[1]) if match else 0


def retry_class(failure: Failure | None) -> _RetryClass:
    """The class of a failure."""
    status = _http_status(failure.code) if failure else 0
    if status in _BUSY:
        return "busy"
    if status in _THROTTLED:
        return "throttled"
    if status in _REFUSED:
        return "refused"
    return "hopeless" if 400 <= status < 500 else "plain"


def backoff(
    failure: Failure | None, attempt: int, first_ms: int, chance: float
) -> tuple[int, bool]:
    """After how many milliseconds attempt `attempt` is followed by the next, and if at all."""
    kind = retry_class(failure)
    if kind == "hopeless" or (kind == "plain" and failure is not None and not failure.retryable):
        return 0, False
    step_ms = first_ms * THROTTLED_FACTOR if kind == "throttled" else first_ms
    return delay_ms(exponential(step_ms, jitter="equal"), attempt, chance), True


class InboxQueue(SqlQueue):
    """The inbox: jobs to be done."""

    def __init__(self, engine: Engine, options: Options, *, worker_id: str = "") -> None:
        def delay(outcome: Outcome) -> tuple[int, bool]:
            attempt, first_ms = outcome.lease.attempt, options.retry_delay_ms
            return backoff(outcome.failure, attempt, first_ms, random.random())

        def throttled_delay_ms(outcome: Outcome) -> int:
            """A task's own policy must not shorten the delay for `throttled`."""
            return delay(outcome)[0] if retry_class(outcome.failure) == "throttled" else 0

        self.slots_max = options.at_once
        super().__init__(
            *(engine, options.settings()),
            worker_id=worker_id,
            delay=delay,
            finals=frozenset(MACHINE.final),
            retry_delay_ms_min=(
                throttled_delay_ms if options.box == "inbox" else lambda outcome: 0
            ),
        )


class OutboxQueue(InboxQueue):
    """The outbox: events to be delivered, one at a time and in order for each job."""

    def __init__(self, engine: Engine, options: Options, *, worker_id: str = "") -> None:
        super().__init__(engine, options, worker_id=worker_id)
        self.claim_max = options.batch
