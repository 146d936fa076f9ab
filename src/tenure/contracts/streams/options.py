"""What a `streams+redis://` URL may say, and the keys that follow from it."""

from __future__ import annotations

import msgspec

from tenure.core.registry import check_least

CONTRACT = "streams"
QUEUE = "jobs:stream"
GROUP = "workers"


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the queue URL; the defaults are for work that must not be lost.

    `namespace` stands before every key, for several queues on one server; without it the keys are
    the contract's exactly. `lost_max` is how often the lease of one job may run out before the job
    ends in `error`. Workers of one queue should share `lease_ms`: a worker takes back entries that
    have been idle for its own lease and whose holder's lease is over. A foreign worker, which knows
    only the contract, writes no lease: it keeps its job until silent for `foreign_lease_ms`.
    `max_depth` bounds waiting, delayed and running jobs together (0: no bound).
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

    def __post_init__(self) -> None:
        check_least(
            self, CONTRACT, lease_ms=50, foreign_lease_ms=50, ttl_s=1, max_depth=0, lost_max=1
        )


def keys(namespace: str) -> list[str]:
    """The keys of every script, in the order in which the scripts name them."""
    names = (
        "stream", "journal", "delayed", "wake", "upkeep", "stats", "index", "paused", "workers",
    )  # fmt: skip
    return [f"{namespace}jobs:{name}" for name in names]
