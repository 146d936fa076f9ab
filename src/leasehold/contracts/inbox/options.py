"""What an `inbox+sqlite://` or `inbox+postgresql://` URL may say."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from leasehold.core.errors import UsageError
from leasehold.ledger.engine import INBOX, OUTBOX
from leasehold.ledger.settings import BoxSettings

CONTRACT = "inbox"

# Contract section 12.
OUTBOX_BATCH = 10
OUTBOX_BATCH_MAX = 25


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the queue URL; the defaults are for work that must not be lost.

    `box=outbox` opens the second queue, that of the events to be delivered. `queue` names one of
    several inboxes of a database, `schema` one of several ledgers of a PostgreSQL database.
    `keep_ms` is how long ended jobs are kept (0: for ever). `lost_max` is the claim budget: how
    often the lease of one job may run out. `synchronous=full` survives a power cut; `normal` may
    lose the last commits then, and nothing else (SQLite's `synchronous`, PostgreSQL's
    `synchronous_commit`).
    """

    queue: str = "inbox"
    box: Literal["inbox", "outbox"] = "inbox"
    schema: str = "leasehold"
    lease_ms: int = 30_000
    max_attempts: int = 5
    retry_delay_ms: int = 1_000
    lost_max: int = 5
    depth_max: int = 0
    idempotency_ttl_s: int = 86_400
    keep_ms: int = 0
    journal_days: float = 30.0
    synchronous: Literal["full", "normal"] = "full"

    def __post_init__(self) -> None:
        for name, least in (("lease_ms", 50), ("max_attempts", 1), ("lost_max", 1), ("keep_ms", 0)):
            value = getattr(self, name)
            if value < least:
                raise UsageError(
                    f"{name} is {value}; it must be at least {least}", contract=CONTRACT
                )
        if not self.queue or len(self.queue) > 100 or not self.queue.isprintable():
            raise UsageError("queue: 1 to 100 printable characters", contract=CONTRACT)

    def settings(self) -> BoxSettings:
        """How the box behaves."""
        is_outbox = self.box == "outbox"
        return BoxSettings(
            contract=CONTRACT,
            table=OUTBOX if is_outbox else INBOX,
            queue=f"{self.queue}/outbox" if is_outbox else self.queue,
            lease_ms=self.lease_ms,
            max_attempts=self.max_attempts,
            lost_max=self.lost_max,
            depth_max=self.depth_max,
            idempotency_ms=self.idempotency_ttl_s * 1000,
            keep_ms=self.keep_ms,
            journal_ms=round(self.journal_days * 86_400_000),
        )

    def engine(self, store: str, *, pinned: bool) -> dict[str, Any]:
        """What the database is told."""
        if store.startswith("postgres"):
            return {"schema": self.schema, "pinned": pinned, "synchronous": self.synchronous}
        return {"synchronous": self.synchronous}
