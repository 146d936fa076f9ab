"""How a box behaves: what a queue URL may say of it, and what follows for the box."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tenure.core.registry import check_least

_DAY_MS = 86_400_000
_KEPT_MS_MAX = 2**53


class BoxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One queue of one table. `lost_max` is how often a job's lease may run out (claim budget).

    `depth_max` 0 is no limit. `unread_ms` is how long history is kept that a reader has not read.
    `keep_credentials` leaves sealed credentials with jobs that have ended. `share` is how many jobs
    of one requester a worker holds at once, `requester_max` how many all workers do (0: any).
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
    unread_ms: int
    keep_credentials: bool = False
    share: int = 0
    requester_max: int = 0


class BoxOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the queue URL of every contract over the ledger may say; each adds its own.

    `schema` names one of several ledgers of a PostgreSQL database, `connections` is how many
    connections to it an event loop opens at most. `keep_ms` is how long ended
    jobs are kept (0: for ever), `journal_days` how long history is; what a capture has not yet read
    of it stays for up to `unread_days`. `lost_max` is the claim budget: how often the lease of one
    job may run out. `synchronous=full` survives a power cut; `normal` may lose the last commits
    then, and nothing else (SQLite's `synchronous`, PostgreSQL's `synchronous_commit`).
    """

    schema: str = "tenure"
    lease_ms: int = 30_000
    max_attempts: int = 5
    retry_delay_ms: int = 1_000
    lost_max: int = 5
    depth_max: int = 0
    idempotency_ttl_s: int = 86_400
    keep_ms: int = 0
    journal_days: float = 30.0
    unread_days: float = 90.0
    synchronous: Literal["full", "normal"] = "full"
    connections: int = 3

    def check(self, contract: str) -> None:
        """Refuse numbers with which no box could work."""
        check_least(
            self, contract, lease_ms=50, max_attempts=1, lost_max=1, keep_ms=0, connections=1
        )

    def of_box(self, *, contract: str, table: str, queue: str) -> BoxSettings:
        """How this queue of this table behaves."""
        return BoxSettings(
            contract=contract,
            table=table,
            queue=queue,
            lease_ms=self.lease_ms,
            max_attempts=self.max_attempts,
            lost_max=self.lost_max,
            depth_max=self.depth_max,
            idempotency_ms=self.idempotency_ttl_s * 1000,
            keep_ms=self.keep_ms,
            journal_ms=min(round(self.journal_days * _DAY_MS), _KEPT_MS_MAX),
            unread_ms=min(round(max(self.journal_days, self.unread_days) * _DAY_MS), _KEPT_MS_MAX),
        )

    def engine(self, store: str, *, pinned: bool) -> dict[str, Any]:
        """What the database is told."""
        if store.startswith("postgres"):
            return {
                "schema": self.schema,
                "pinned": pinned,
                "synchronous": self.synchronous,
                "connections": self.connections,
            }
        return {"synchronous": self.synchronous}
