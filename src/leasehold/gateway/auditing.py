"""Where a gateway writes down who did what: beside the jobs of its first queue."""

from __future__ import annotations

import msgspec

from leasehold.core.opening import open_part, parse_url
from leasehold.dashboard.audit import KEPT, AuditLog, Entry, MemoryAudit, RedisAudit
from leasehold.ledger.engine import INBOX, Engine
from leasehold.store.redis import Redis

_BEYOND = 2**62


class SqlAudit:
    """Kept in the database that also keeps the keys, so that all gateways of a queue share it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def add(self, entry: Entry) -> None:
        body = msgspec.json.encode(entry).decode()
        await self._engine.run(INBOX, "audit_add", entry=body, kept=KEPT)

    async def list(self, *, before: str = "", limit: int = 100) -> list[Entry]:
        last = int(before) if before.isdecimal() else _BEYOND
        rows = await self._engine.run(INBOX, "audit_list", before=last, count=limit)
        return [msgspec.structs.replace(_entry(row["entry"]), id=str(row["seq"])) for row in rows]

    async def close(self) -> None:
        await self._engine.close()


def _entry(text: str) -> Entry:
    try:
        return msgspec.json.decode(text, type=Entry)
    except msgspec.DecodeError:  # written by another program: the others are shown all the same
        return Entry(ts_ms=0, who="", action="unreadable", outcome=text[:200])


def open_audit(queue_url: str, side: tuple[Redis, str] | None) -> AuditLog:
    """The log that belongs to a queue; `side` is its Redis and prefix, if it has one."""
    url = parse_url(queue_url)
    if side is not None:
        return RedisAudit(side[0], prefix=side[1])
    if url.store.startswith(("sqlite", "postgres", "libsql")):
        return SqlAudit(open_part(queue_url, "database"))
    return MemoryAudit()
