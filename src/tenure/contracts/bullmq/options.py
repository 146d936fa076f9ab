"""What a `bullmq+redis://` URL may say, and the keys that follow from it."""

from __future__ import annotations

import base64

import msgspec

from tenure.core.errors import UsageError
from tenure.core.registry import check_least

CONTRACT = "bullmq"

_KEYS = (
    "wait",
    "active",
    "prioritized",
    "delayed",
    "paused",
    "meta",
    "events",
    "marker",
    "stalled",
    "limiter",
    "pc",
    "completed",
    "failed",
    "waiting-children",
    "id",
    "tenure:journal",
)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the queue URL; the defaults are those of a BullMQ worker.

    `lease_ms` is BullMQ's lockDuration, `stalled_max` its maxStalledCount (how often the lease of
    one job may run out before the job fails), `stalled_ms` its stalledInterval. `limit_max` jobs
    per `limit_ms` is the worker's rate limiter, `metrics_minutes` its metrics.maxDataPoints.
    `keep_completed` and `keep_failed` say how many finished jobs are kept where a job names
    nothing (-1: all), `keep_completed_s` and `keep_failed_s` for how long (0: for ever).
    `max_depth` bounds unfinished jobs (0: no bound).
    """

    queue: str = "jobs"
    prefix: str = "bull"
    name: str = ""
    lease_ms: int = 30_000
    stalled_max: int = 1
    stalled_ms: int = 30_000
    limit_max: int = 0
    limit_ms: int = 0
    metrics_minutes: int = 0
    keep_completed: int = -1
    keep_failed: int = -1
    keep_completed_s: int = 0
    keep_failed_s: int = 0
    max_attempts: int = 0
    max_depth: int = 0
    idempotency_ttl_s: int = 86_400
    journal_bytes: int = 32_000_000
    journal_days: float = 7.0
    unread_days: float = 30.0

    def __post_init__(self) -> None:
        check_least(self, CONTRACT, lease_ms=50, stalled_max=0, stalled_ms=50)
        if not self.queue or ":" in self.queue:
            raise UsageError(
                f"queue {self.queue!r}: a BullMQ queue has a name, and no colon in it",
                contract=CONTRACT,
            )
        if bool(self.limit_max) != bool(self.limit_ms):
            raise UsageError(
                "a rate limit needs both limit_max (jobs) and limit_ms", contract=CONTRACT
            )

    @property
    def key_prefix(self) -> str:
        """What stands before every key of the queue."""
        return f"{self.prefix}:{self.queue}:"


def keys(key_prefix: str) -> list[str]:
    """The sixteen keys of every script, in the order in which the scripts name them."""
    return [key_prefix + name for name in _KEYS]


def client_name(options: Options, worker_id: str = "") -> str:
    """The connection name by which `queue.getWorkers()` and dashboards know a worker.

    Redis takes no spaces in it; the queue's name is hidden in base64 for that reason.
    """
    queue = base64.b64encode(options.queue.encode()).decode()
    name = "".join(c if c.isprintable() and c not in ' "' else "-" for c in worker_id)
    return f"{options.prefix}:{queue}" + (f":w:{name}" if name else "")
