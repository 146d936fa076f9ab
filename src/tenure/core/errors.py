"""Every error Tenure raises, as one tree.

    TenureError
    ├── UsageError                the request can never succeed as it stands
    │   ├── InvalidJob            a job that no contract could take (bad task, payload, option)
    │   ├── InvalidTransition     a state change that the contract's table does not have
    │   ├── UnknownContract       a queue URL whose scheme names no contract
    │   └── UnknownTask           no handler is registered under that name
    ├── NotFound                  the job or queue does not exist (or has expired)
    ├── Conflict                  the store holds something that contradicts the request
    ├── QueueFull                 backpressure: try again after `retry_after_ms`
    ├── JobFailed                 the job whose result was awaited has failed for good
    ├── JobCancelled              the job whose result was awaited was cancelled
    ├── InvalidResult             the result is not of the type that the task declares
    ├── Timeout                   the job did not end in time; it goes on
    ├── LeaseLost                 the lease is no longer ours: stop, write nothing
    └── StoreError                the store answered with an error, or did not answer
        ├── ServerError           it answered with an error
        ├── StoreUnreachable      it could not be reached: nothing was executed
        └── ReplyLost             the request left, the answer never came: it may have been executed
            └── NotReplicated     it was executed, but fewer replicas have it than were asked for

Signals that a handler raises to say how its attempt ends are in `core.outcome`.
"""

from __future__ import annotations

_FRAMES_MAX = 50
_PART_CHARS_MAX = 2_000
TRACEBACK_CHARS_MAX = 8_000


class TenureError(Exception):
    """Root of the tree; says in which `contract` and `operation`, and what was the `reply`."""

    code = "error"

    def __init__(
        self, message: str, *, contract: str = "", operation: str = "", reply: object = None
    ) -> None:
        super().__init__(message)
        self.contract = contract
        self.operation = operation
        self.reply = reply


class UsageError(TenureError):
    """The request can never succeed as it stands; the message says what would."""

    code = "usage"


class InvalidJob(UsageError):
    """The job itself is not acceptable; nothing was written."""

    code = "invalid_job"


class InvalidTransition(UsageError):
    """The contract's transition table has no such step."""

    code = "invalid_transition"


class UnknownContract(UsageError):
    """There is no contract of the name in this queue URL."""

    code = "unknown_contract"


class UnknownTask(UsageError):
    """No handler is registered for this task."""

    code = "unknown_task"


class NotFound(TenureError):
    """There is no such job or queue, or it has expired."""

    code = "not_found"


class Conflict(TenureError):
    """The store holds something else under this key, or the state of the job forbids the step."""

    code = "conflict"


class QueueFull(TenureError):
    """The queue is at its limit; nothing was written. Try again after `retry_after_ms`."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_ms: int = 1000, contract: str = "") -> None:
        super().__init__(message, contract=contract, operation="submit")
        self.retry_after_ms = retry_after_ms

    @property
    def retry_after_s(self) -> float:
        """When to try again, in seconds from now."""
        return self.retry_after_ms / 1000


class JobFailed(TenureError):
    """The job has failed for good; the message is its last error.

    `error_code` is the class or code of that error. `traceback` is the worker's, "" where the
    contract keeps none; it is also the `__cause__`, so that an uncaught error shows both.
    """

    code = "job_failed"

    def __init__(
        self,
        message: str,
        *,
        job_id: str = "",
        error_code: str = "",
        traceback: str = "",
        attempts: int = 0,
        contract: str = "",
    ) -> None:
        super().__init__(message, contract=contract, operation="result")
        self.job_id = job_id
        self.error_code = error_code
        self.traceback = traceback
        self.attempts = attempts
        if traceback:
            self.__cause__ = RemoteTraceback(traceback)


class RemoteTraceback(Exception):
    """The traceback of a worker as text, for the cause of a `JobFailed`."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class JobCancelled(TenureError):
    """The job was cancelled before it was done."""

    code = "job_cancelled"

    def __init__(self, message: str, *, job_id: str = "", contract: str = "") -> None:
        super().__init__(message, contract=contract, operation="result")
        self.job_id = job_id


class InvalidResult(TenureError):
    """The job is done, but its result is not of the type that its task declares."""

    code = "invalid_result"


class Timeout(TenureError, TimeoutError):
    """The job had not ended when the caller's time was up. It goes on; await it again or cancel."""

    code = "wait_timeout"


class LeaseLost(TenureError):
    """The lease has ended or another worker holds it. It may also answer one item of a batch."""

    code = "lease_lost"

    def __init__(self, job_id: str, reason: str = "the lease is no longer held") -> None:
        super().__init__(f"job {job_id}: {reason}")
        self.job_id = job_id
        self.reason = reason


class StoreError(TenureError):
    """The store answered with an error or not at all."""

    code = "store"


class ServerError(StoreError):
    """The store answered with an error; `reply` is its text.

    `named` is the record of the queue that caused it, if known.
    """

    code = "store_answered_error"
    named = ""


class StoreUnreachable(StoreError):
    """The request never reached the store: nothing was executed and it is safe to send it again."""

    code = "store_unreachable"


class ReplyLost(StoreError):
    """Sent, whole or in part, but not answered: it may have been executed. Only a call that carries
    ids or a request id may be sent again."""

    code = "reply_lost"


class NotReplicated(ReplyLost):
    """It was executed, but fewer replicas have it than the URL asks for: a failover may undo it.

    Submit again under the same id or idempotency key: what is stored is not stored twice.
    """

    code = "not_replicated"


def traceback_of(error: BaseException) -> str:
    """The last frames of an error as plain text of bounded length, without any local variable."""
    import traceback  # imported here, so that commands start faster

    parts = traceback.format_exception(error, limit=-_FRAMES_MAX)
    short = (p if len(p) <= _PART_CHARS_MAX else f"{p[:_PART_CHARS_MAX]}...\n" for p in parts)
    return "".join(short)[-TRACEBACK_CHARS_MAX:]
