"""Where a gateway writes down who did what: beside the jobs of its first queue."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tenure.core.registry import open_part, parse_url
from tenure.dashboard.audit import (
    KEPT,
    PAGE,
    AuditLog,
    Entry,
    Head,
    Link,
    MemoryAudit,
    is_position,
)
from tenure.ledger.engine import INBOX, Engine
from tenure.store.redis import Redis
from tenure.store.scripts import ScriptFolder

_LAST = 2**63 - 1
_ID_MAX = 2**64 - 1  # of both parts of an id in Redis
_NUMBER = re.compile(rb"[0-9]{1,18}")
_SCRIPTS = ScriptFolder("tenure.dashboard")


class RedisAudit(AuditLog):
    """Kept in the store that also keeps the keys, so that all gateways of a queue share it."""

    def __init__(self, redis: Redis, *, prefix: str = "", keep: int = KEPT) -> None:
        super().__init__(keep=keep)
        self._redis = redis
        self._key = f"{prefix}tenure:audit"

    async def list(self, *, before: str = "", limit: int = 100) -> list[Entry]:
        # Read inclusively and drop the one that was seen: an open end before 0-1 is an error.
        found = await self._newest(before if is_position(before) else "+", limit + 1)
        return [link.read() for link in found if link.id != before][:limit]

    async def _newest(self, end: str, count: int) -> Sequence[Link]:
        rows: Any = await self._redis.call("XREVRANGE", self._key, end, "-", "COUNT", count)
        return [_entry_link(row) for row in rows]

    async def _read_head(self) -> Head:
        size = int(await self._redis.call("XLEN", self._key))
        place, end = "", "+"
        while found := await self._newest(end, PAGE if place else 1):
            place = place or found[0].id
            for link in found:
                if link.hash and link.seq:  # others are of an earlier version, or unreadable
                    return Head(link.seq, link.hash, place, size)
            if found[-1].id == end:
                break
            end = found[-1].id
        return Head(id=place, size=size)

    async def _read(self, after: str, count: int) -> Sequence[Link]:
        if after == f"{_ID_MAX}-{_ID_MAX}":
            return []
        begin = _next_id(after) if after else "-"
        rows: Any = await self._redis.call("XRANGE", self._key, begin, "+", "COUNT", count)
        return [_entry_link(row) for row in rows]

    async def _store(self, link: Link, head: Head, pruned: str) -> str:
        fields = (link.seq, link.prev, link.hash, link.entry)
        oldest = _next_id(pruned) if pruned else ""
        place = await self._redis.run(_SCRIPTS["audit"], [self._key], [head.id, *fields, oldest])
        return place.decode() if place else ""


def _entry_link(row: Any) -> Link:
    place, fields = row
    named = dict(zip(fields[::2], fields[1::2], strict=False))
    seq = named.get(b"n", b"")
    prev, own = (named.get(name, b"").decode(errors="replace") for name in (b"p", b"h"))
    number = int(seq) if _NUMBER.fullmatch(seq) else 0
    return Link(seq=number, prev=prev, hash=own, entry=named.get(b"e", b""), id=place.decode())


def _next_id(place: str) -> str:
    time_ms, _, number = place.partition("-")
    if int(number or 0) < _ID_MAX:
        return f"{time_ms}-{int(number or 0) + 1}"
    return f"{min(int(time_ms) + 1, _ID_MAX)}-0"


class SqlAudit(AuditLog):
    """Kept in the database that also keeps the keys, so that all gateways of a queue share it."""

    def __init__(self, engine: Engine, *, keep: int = KEPT) -> None:
        super().__init__(keep=keep)
        self._engine = engine

    async def list(self, *, before: str = "", limit: int = 100) -> list[Entry]:
        is_place = is_position(before) and before.isdecimal()
        last = min(int(before) - 1, _LAST) if is_place else _LAST
        rows = await self._engine.run(INBOX, "audit_list", through=last, count=limit)
        return [_link(row).read() for row in rows]

    async def close(self) -> None:
        await self._engine.close()

    async def _read_head(self) -> Head:
        row = (await self._engine.run(INBOX, "audit_head"))[0]
        return Head(row["number"], str(row["hash"]), str(row["seq"]), row["size"])

    async def _read(self, after: str, count: int) -> Sequence[Link]:
        place = int(after) if after else -_LAST
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
            pruned=int(pruned) if pruned else -_LAST,
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
