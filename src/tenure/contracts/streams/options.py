"""The options of a `streams+redis://` URL, and the keys of its queue."""

from __future__ import annotations

import msgspec

from tenure.core.errors import UsageError
from tenure.core.registry import check_least

CONTRACT = "streams"
QUEUE = "jobs:stream"
GROUP = "workers"
SHARDS_MAX = 128


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the queue URL; the defaults are for work that must not be lost.

    `namespace` is a prefix of every key, for several queues on one server; without it the keys are
    exactly the contract's. `lost_max` is how often the lease of one job may expire before the job
    ends in `error`. Workers of one queue should have the same `lease_ms`: a worker takes back
    entries that have been idle for its own lease and whose lease has expired. A foreign worker,
    which knows only the contract, writes no lease; it keeps its job until it has been silent for
    `foreign_lease_ms`. `max_depth` limits waiting, delayed and running jobs together (0: no limit).
    `shards` is over how many slots of a cluster the queue is spread (see `shards.py`).
    """

    namespace: str = ""
    lease_ms: int = 15_000
    foreign_lease_ms: int = 600_000
    ttl_s: int = 86_400
    max_depth: int = 100_000
    lost_max: int = 5
    idempotency_ttl_s: int = 86_400
    retry_delay_ms: int = 1_000
    journal_bytes: int = 32_000_000
    journal_days: float = 7.0
    unread_days: float = 30.0
    shards: int = 1

    def __post_init__(self) -> None:
        check_least(
            self, CONTRACT, lease_ms=50, foreign_lease_ms=50, ttl_s=1, max_depth=0, lost_max=1,
            shards=1,
        )  # fmt: skip
        if self.shards > SHARDS_MAX:
            raise UsageError(f"shards is {self.shards}; it is at most {SHARDS_MAX}")


def keys(namespace: str) -> list[str]:
    """The KEYS of every script, in their order."""
    names = (
        "stream", "journal", "delayed", "wake", "upkeep", "stats", "index", "paused", "workers",
    )  # fmt: skip
    return [f"{namespace}jobs:{name}" for name in names]
