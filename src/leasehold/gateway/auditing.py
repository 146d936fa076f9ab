"""Where a gateway writes down who did what: beside the jobs of its first queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leasehold.core.opening import open_part, parse_url
from leasehold.dashboard.audit import (
    KEPT,
    AuditLog,
    Entry,
    Head,
    Link,
    MemoryAudit,
    RedisAudit,
    is_position,
)
from leasehold.ledger.engine import INBOX, Engine
from leasehold.store.redis import Redis

_BEYOND = 2**62


class SqlAudit(AuditLog):
    """Kept in the database that also keeps the keys, so that all gateways of a queue share it."""

    def __init__(self, engine: Engine, *, keep: int = KEPT) -> None:
        super().__init__(keep=keep)
        self._engine = engine

    async def list(self, *, before: str = "", limit: int = 100) -> list[Entry]:
        last = int(before) if is_position(before) and before.isdecimal() else _BEYOND
        rows = await self._engine.run(INBOX, "audit_list", before=last, count=limit)
        return [_link(row).read() for row in rows]

    async def close(self) -> None:
        await self._engine.close()

    async def _read_head(self) -> Head:
        row = (await self._engine.run(INBOX, "audit_head"))[0]
        return Head(row["number"], row["hash"], str(row["seq"]), row["size"])

    async def _read(self, after: str, count: int) -> Sequence[Link]:
        place = int(after) if after else -_BEYOND
        rows = await self._engine.run(INBOX, "audit_read", after=place, count=count)
        return [_link(row) for row in rows]

    async def _store(self, link: Link, head: Head, pruned: str) -> str:
        rows = await self._engine.run(
            INBOX,
            "audit_add",
            number=link.seq,
            prev=link.prev,
            hash=link.hash,
            entry=link.entry.decode(),
            pruned=int(pruned) if pruned else -_BEYOND,
        )
        return str(rows[0]["seq"]) if rows else ""


def _link(row: Any) -> Link:
    return Link(
        seq=row["number"] or 0,
        prev=str(row["prev"]),
        hash=str(row["hash"]),
        entry=str(row["entry"]).encode(errors="surrogateescape"),
        id=str(row["seq"]),
    )


def open_audit(queue_url: str, side: tuple[Redis, str] | None, *, keep: int = KEPT) -> AuditLog:
    """The log that belongs to a queue; `side` is its Redis and prefix, if it has one."""
    url = parse_url(queue_url)
    if side is not None:
        return RedisAudit(side[0], prefix=side[1], keep=keep)
    if url.store.startswith(("sqlite", "postgres", "libsql")):
        return SqlAudit(open_part(queue_url, "database"), keep=keep)
    return MemoryAudit(keep=keep)
