"""How a box behaves: what a queue URL may say of it, after the contract has read it."""

from __future__ import annotations

import msgspec


class BoxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One queue of one table. `lost_max` is how often a job's lease may run out (claim budget).

    `depth_max` 0 is no limit.
    """

    contract: str
    table: str
    queue: str
    lease_ms: int
    max_attempts: int
    lost_max: int
    depth_max: int
    idempotency_ms: int
    keep_ms: int
    journal_ms: int
