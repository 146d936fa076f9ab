"""The options of an `omniq+redis://` URL, the names of queues, and OmniQ's own errors."""

from __future__ import annotations

import re

import msgspec

from tenure.core.errors import Conflict, InvalidJob, LeaseLost, UsageError
from tenure.core.registry import check_least

CONTRACT = "omniq"
QUEUE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")

MAX_ATTEMPTS = 3
TIMEOUT_MS = 30_000
BACKOFF_MS = 5_000


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the queue URL. `queue` is the queue's name.

    `timeout_ms`, `max_attempts` and `backoff_ms` are the defaults of jobs submitted here; a lease
    lasts as long as the timeout of its job. `task` is the task of jobs without one, such as all
    jobs of other OmniQ clients; its default is the queue's name. `max_depth` limits waiting,
    delayed and running jobs together (0: no limit). Other clients trim completed jobs to OmniQ's
    100, whatever `keep_completed` says. `keep_failed` 0 keeps all. An idle worker sees the jobs of
    other clients' publishers within `poll_ms`.
    """

    queue: str
    task: str = ""
    timeout_ms: int = TIMEOUT_MS
    max_attempts: int = MAX_ATTEMPTS
    backoff_ms: int = BACKOFF_MS
    max_depth: int = 0
    keep_completed: int = 100
    keep_failed: int = 10_000
    idempotency_ttl_s: int = 86_400
    poll_ms: int = 40
    journal_bytes: int = 32_000_000
    journal_days: float = 7.0
    unread_days: float = 30.0

    def __post_init__(self) -> None:
        queue_base(self.queue)
        check_least(self, CONTRACT, timeout_ms=50, max_attempts=1, backoff_ms=0, poll_ms=5)
        check_least(self, CONTRACT, keep_completed=1, keep_failed=0, max_depth=0)


class QueueNameError(UsageError, ValueError):
    """The queue's name is not allowed."""


def queue_base(queue: str) -> str:
    """The prefix of all keys of a queue: `{name}`, also for a name that has braces already.

    >>> queue_base("emails"), queue_base("{emails}")
    ('{emails}', '{emails}')
    """
    name = queue[1:-1] if queue.startswith("{") and queue.endswith("}") else queue
    if not QUEUE_NAME.fullmatch(name):
        raise QueueNameError(
            f"queue {queue[:140]!r}: 1 to 128 of letters, digits and . _ -", contract=CONTRACT
        )
    return f"{{{name}}}"


class NotActive(LeaseLost):
    """The job has no lease: it expired and was taken back."""

    code = "NOT_ACTIVE"


class TokenMismatch(LeaseLost):
    """The token is not that of the job's lease, or the job has ended or was deleted."""

    code = "TOKEN_MISMATCH"


class PayloadType(InvalidJob, TypeError):
    """The payload is not a JSON object or array."""


class PayloadValue(InvalidJob, ValueError):
    """The payload cannot be written as JSON."""


class OptionValue(InvalidJob, ValueError):
    """An option of `publish` is out of range."""


class Refused(Conflict):
    """OmniQ refused an operation; `word` is NO_JOB, NOT_FAILED, ACTIVE, LANE_MISMATCH ..."""

    def __init__(self, operation: str, subject: str, word: str) -> None:
        super().__init__(
            f"{operation} of {subject}: {word}", contract=CONTRACT, operation=operation, reply=word
        )
        self.word = word


_REASONS = {
    "NOT_ACTIVE": "NOT_ACTIVE: no worker holds a lease on the job",
    "TOKEN_REQUIRED": "TOKEN_MISMATCH: no lease token was given",
    "TOKEN_MISMATCH": "TOKEN_MISMATCH: another token holds the job, or it has ended",
}


def lost(job_id: str, reason: bytes) -> LeaseLost:
    """The seam's answer for OmniQ's reason."""
    return LeaseLost(job_id, _REASONS[reason.decode()])


def refusal(job_id: str, reason: bytes) -> LeaseLost:
    """The contract's error for OmniQ's reason."""
    kind = NotActive if reason == b"NOT_ACTIVE" else TokenMismatch
    return kind(job_id, _REASONS[reason.decode()])
