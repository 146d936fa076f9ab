"""Who did what to which jobs: every action of a person is written down before it is answered."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
import structlog

from leasehold.core.errors import ReplyLost, StoreError
from leasehold.store.redis import Redis

_log = structlog.get_logger("leasehold.audit")

KEPT = 10_000
LOCAL = "local"
LOST = "unknown: the answer of the store was lost"
IDS_MAX = 20


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One action. `who` is the key's id, "local" without one; `whose` are the owners of the
    objects, `ids` the first few of these."""

    ts_ms: int
    who: str
    action: str
    queue: str = ""
    whose: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    jobs: int = 0
    search: str = ""
    outcome: str = ""
    id: str = ""


class AuditLog(Protocol):
    """Where entries are kept."""

    async def add(self, entry: Entry) -> None:
        """Write one down."""

    async def list(self, *, before: str = "", limit: int = 100) -> list[Entry]:
        """The newest first; `before` is the id of the last one seen."""

    async def close(self) -> None:
        """Let go of what was opened for it."""


class MemoryAudit:
    """Kept by this process alone; the log has the same lines."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._number = 0

    async def add(self, entry: Entry) -> None:
        self._number += 1
        self._entries.appendleft(msgspec.structs.replace(entry, id=f"{self._number:012d}"))

    async def list(self, *, before: str = "", limit: int = 100) -> list[Entry]:
        return [each for each in self._entries if not before or each.id < before][:limit]

    async def close(self) -> None:
        """There is nothing to let go."""


class RedisAudit:
    """Kept in the store that also keeps the keys, so that all gateways of a queue share it."""

    def __init__(self, redis: Redis, *, prefix: str = "") -> None:
        self._redis = redis
        self._key = f"{prefix}leasehold:audit"

    async def add(self, entry: Entry) -> None:
        body = msgspec.json.encode(entry)
        await self._redis.call("XADD", self._key, "MAXLEN", "~", KEPT, "*", "e", body)

    async def list(self, *, before: str = "", limit: int = 100) -> list[Entry]:
        # Read inclusively and drop the one that was seen: an open end before 0-1 is an error.
        end = before or "+"
        rows: Any = await self._redis.call("XREVRANGE", self._key, end, "-", "COUNT", limit + 1)
        rows = [row for row in rows if row[0].decode() != before][:limit]
        return [
            msgspec.structs.replace(
                msgspec.json.decode(fields[1], type=Entry), id=entry_id.decode()
            )
            for entry_id, fields in rows
        ]

    async def close(self) -> None:
        """The connection is the gateway's."""


async def write_down(
    log: AuditLog,
    who: str,
    action: str,
    *,
    queue: str = "",
    whose: Iterable[str] = (),
    ids: Sequence[str] = (),
    jobs: int | None = None,
    search: str = "",
    outcome: str = "",
) -> None:
    """Note an action, in the audit log and in the process's own log.

    The action has been done by then: where the audit log's store is away, the process's log has
    the entry alone.
    """
    entry = Entry(
        ts_ms=time.time_ns() // 1_000_000,
        who=who or LOCAL,
        action=action,
        queue=queue,
        whose=tuple(sorted({owner or LOCAL for owner in whose})[:IDS_MAX]),
        ids=tuple(ids[:IDS_MAX]),
        jobs=len(ids) if jobs is None else jobs,
        search=search,
        outcome=outcome,
    )
    _log.info("action", **msgspec.to_builtins(entry))
    try:
        await log.add(entry)
    except StoreError as error:
        _log.error("audit_not_stored", error=str(error), **msgspec.to_builtins(entry))


@asynccontextmanager
async def noted(
    log: AuditLog, who: str, action: str, **what: Any
) -> AsyncGenerator[dict[str, Any]]:
    """Write down what is done within, with what that adds to the entry.

    Where the store's answer was lost it may have been done: the entry says so. An
    action that was refused or failed in another way changed nothing and has no entry.
    """
    entry = dict(what)
    try:
        yield entry
    except ReplyLost:
        await write_down(log, who, action, **entry | {"outcome": LOST})
        raise
    await write_down(log, who, action, **entry)
