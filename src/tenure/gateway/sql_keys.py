"""The key ring of a queue in a database: the tables `api_keys`, `api_tickets`, `api_sessions`."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import msgspec
import structlog

from tenure.core.endpoint import Caller
from tenure.core.registry import open_part
from tenure.gateway.keys import (
    SESSIONS_PER_KEY,
    TICKET_S,
    TOUCH_MS,
    Key,
    Session,
    new_key,
    secret_hash,
)
from tenure.gateway.limits import Quota, read_quota
from tenure.ledger.engine import INBOX, Engine, Row

_TICKET_BYTES = 32
_TIMES = ("created_ms", "expires_ms", "last_used_ms")
_log = structlog.get_logger("tenure.gateway")


class SqlKeyRing:
    """The ring in the store of a queue on SQLite or PostgreSQL; times are the store's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def create(
        self, scopes: Iterable[str], name: str, ttl_ms: int | None = None
    ) -> tuple[Key, str]:
        key, text = new_key(scopes, name, ttl_ms, 0)
        rows = await self._engine.run(
            INBOX,
            "key_add",
            key_id=key.id,
            name=key.name,
            scopes=" ".join(key.scopes),
            secret_h=key.secret_h,
            ttl_ms=ttl_ms or 0,
        )
        times = {name: rows[0][name] for name in ("created_ms", "expires_ms")}
        return msgspec.structs.replace(key, **times), text

    async def limit(self, key_id: str, quota: Quota) -> bool:
        text = msgspec.json.encode(quota).decode()
        return bool(await self._engine.run(INBOX, "key_limit", key_id=key_id, quota=text))

    async def list(self) -> list[Key]:
        keys = [_key(row) for row in await self._engine.run(INBOX, "key_list")]
        return [key for key in keys if key]

    async def revoke(self, key_id: str) -> bool:
        return bool((await self._engine.run(INBOX, "key_revoke", key_id=key_id))[0]["gone"])

    async def find(self, key_id: str) -> Key | None:
        rows = await self._engine.run(INBOX, "key_find", key_id=key_id)
        return _key(rows[0]) if rows else None

    async def count(self) -> int:
        return len(await self._engine.run(INBOX, "key_list"))

    async def touch(self, key_id: str, now_ms: int) -> None:
        await self._engine.run(INBOX, "key_touch", key_id=key_id)

    async def issue(self, caller: Caller) -> str:
        ticket = secrets.token_urlsafe(_TICKET_BYTES)
        await self._engine.run(
            INBOX,
            "ticket_add",
            ticket_h=secret_hash(ticket),
            caller=msgspec.json.encode(caller).decode(),
            ttl_ms=TICKET_S * 1000,
        )
        return ticket

    async def redeem(self, ticket: str) -> Caller | None:
        rows = await self._engine.run(INBOX, "ticket_take", ticket_h=secret_hash(ticket))
        return msgspec.json.decode(rows[0]["caller"], type=Caller) if rows else None

    async def open_session(self, key_id: str, ttl_ms: int, idle_ms: int) -> str:
        text = secrets.token_urlsafe(_TICKET_BYTES)
        await self._engine.run(
            INBOX,
            "session_add",
            session_h=secret_hash(text),
            key_id=key_id,
            ttl_ms=ttl_ms,
            idle_ms=idle_ms,
            others=SESSIONS_PER_KEY - 1,
        )
        return text

    async def find_session(self, session_h: str, *, used: bool = True) -> Session | None:
        rows = await self._engine.run(INBOX, "session_find", session_h=session_h)
        if rows and used and rows[0]["unused_ms"] > TOUCH_MS:
            await self._engine.run(INBOX, "session_touch", session_h=session_h)
        return _session(rows[0]) if rows else None

    async def sessions(self) -> Sequence[Session]:
        rows = await self._engine.run(INBOX, "session_find", session_h="")
        return [_session(row) for row in rows]

    async def end_sessions(self, *, session_h: str = "", key_id: str = "") -> int:
        takes = {"session_h": session_h, "key_id": key_id}
        return int((await self._engine.run(INBOX, "session_end", **takes))[0]["gone"])

    async def close(self) -> None:
        await self._engine.close()


def _key(row: Row) -> Key | None:
    """A stored key; None for a row that is none."""
    named = {name: row[name] for name in ("name", "secret_h", *_TIMES)}
    quota = read_quota(row["quota"], row["key_id"])
    scopes = row["scopes"].split()
    try:
        return msgspec.convert({"id": row["key_id"], "scopes": scopes, "quota": quota} | named, Key)
    except msgspec.ValidationError as error:
        _log.error("key_unreadable", key_id=row["key_id"], error=str(error))
        return None


def _session(row: Row) -> Session:
    return Session(**{name: row[name] for name in Session.__struct_fields__})


def open_sql_keyring(queue_url: str) -> SqlKeyRing:
    """The ring beside the queue that a URL names."""
    return SqlKeyRing(open_part(queue_url, "database"))
