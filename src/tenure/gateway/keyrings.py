"""Key rings in Redis and SQL stores, beside the jobs of a queue, and several rings as one.

A gateway with several stores looks for a key in each of them. A store that does not answer makes
only its own keys unusable: a key that the other stores do not have is then a 503, not a 401. A key
never moves, so once its store is known, only that store is asked. A store that refuses all users of
the gateway keeps no keys for it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec
import structlog

from tenure.core.endpoint import Caller
from tenure.core.errors import ServerError, StoreError, StoreUnreachable
from tenure.core.registry import open_part, parse_url
from tenure.dashboard.display import now_ms
from tenure.gateway.keys import (
    SESSIONS_PER_KEY,
    TICKET_S,
    TOUCH_MS,
    Key,
    KeyRing,
    Keys,
    MemoryKeyRing,
    Session,
    new_key,
    new_session,
    new_token,
    secret_hash,
    surplus_sessions,
)
from tenure.gateway.limits import Quota, read_quota
from tenure.sql.engine import INBOX, Engine, Row
from tenure.store.redis import STORE_OPTIONS, Redis

T = TypeVar("T")

_log = structlog.get_logger("tenure.gateway")

_ANSWER_S = 2.0
_RETRY_S = 1.0
_HOMES_MAX = 10_000
# Options of a URL that select the store or a part of it.
_LOCATION = ("namespace", "schema", "db", "host", "port", "dbname")
_NO_PRIVILEGE = "42501"  # PostgreSQL: insufficient_privilege
_TIME = re.compile(rb"[0-9]{1,14}")
_TIMES = ("created_ms", "expires_ms", "last_used_ms")


class RedisKeyRing:
    """The key ring of a queue on Redis."""

    def __init__(
        self, redis: Redis, *, prefix: str = "", clock_ms: Callable[[], int] = now_ms
    ) -> None:
        self._redis = redis
        self._keys = f"{prefix}tenure:keys"
        self._used = f"{prefix}tenure:keys:used"
        self._quotas = f"{prefix}tenure:keys:quotas"
        self._ticket = f"{prefix}tenure:ticket:"
        self._sessions = f"{prefix}tenure:sessions"
        self._seen = f"{prefix}tenure:sessions:seen"
        self._clock_ms = clock_ms
        self._refused = False

    async def create(
        self, scopes: Iterable[str], name: str, ttl_ms: int | None = None
    ) -> tuple[Key, str]:
        key, text = new_key(scopes, name, ttl_ms, self._clock_ms())
        await self._redis.call("HSET", self._keys, key.id, msgspec.json.encode(key))
        return key, text

    async def limit(self, key_id: str, quota: Quota) -> bool:
        # Quotas have their own hash, so that writing one cannot restore a revoked key.
        if not await self._redis.call("HEXISTS", self._keys, key_id):
            return False
        await self._redis.call("HSET", self._quotas, key_id, msgspec.json.encode(quota))
        return True

    async def list(self) -> list[Key]:
        stored, *others = await self._redis.pipeline(
            [("HGETALL", name) for name in (self._keys, self._used, self._quotas)]
        )
        if isinstance(stored, Exception):
            raise stored
        used, quotas = (_pairs(_optional(reply) or []) for reply in others)
        records = _pairs(stored).items()
        keys = [_read_key(name, raw, quotas.get(name), used.get(name)) for name, raw in records]
        return sorted(filter(None, keys), key=lambda key: key.created_ms)

    async def revoke(self, key_id: str) -> bool:
        removed, *_ = await self._redis.pipeline(
            [("HDEL", name, key_id) for name in (self._keys, self._used, self._quotas)]
        )
        if isinstance(removed, Exception):
            raise removed
        await self.end_sessions(key_id=key_id)
        return bool(removed)

    async def find(self, key_id: str) -> Key | None:
        raw, quota = await self._redis.pipeline(
            [("HGET", self._keys, key_id), ("HGET", self._quotas, key_id)]
        )
        if isinstance(raw, Exception):
            raise raw
        return None if raw is None else _read_key(key_id.encode(), raw, _optional(quota))

    async def count(self) -> int:
        try:
            return int(await self._redis.call("HLEN", self._keys))
        except ServerError as error:
            if _is_refusal(error) and not self._refused:
                self._refused = True
                remedy = "no key of this store is accepted; to keep keys there, allow ~tenure:*"
                _log.warning("keys_refused", store=repr(self._redis), error=str(error), note=remedy)
            raise

    async def touch(self, key_id: str, now_ms: int) -> None:
        with suppress(ServerError):  # the last use is only information
            await self._redis.call("HSET", self._used, key_id, now_ms)

    async def issue(self, caller: Caller) -> str:
        ticket = new_token()
        name = self._ticket + secret_hash(ticket)
        await self._redis.call("SET", name, msgspec.json.encode(caller), "EX", TICKET_S)
        return ticket

    async def redeem(self, ticket: str) -> Caller | None:
        raw = await self._redis.call("GETDEL", self._ticket + secret_hash(ticket))
        return None if raw is None else _read_caller(raw)

    async def open_session(self, key_id: str, ttl_ms: int, idle_ms: int) -> str:
        now_ms = self._clock_ms()
        await self._forget(surplus_sessions(await self._all_sessions(), key_id, now_ms))
        session, text = new_session(key_id, ttl_ms, idle_ms, now_ms)
        raw = msgspec.json.encode(session)
        await self._redis.call("HSET", self._sessions, session.session_h, raw)
        return text

    async def find_session(self, session_h: str, *, used: bool = True) -> Session | None:
        raw = await self._redis.call("HGET", self._sessions, session_h)
        if raw is None:
            return None
        # The last use has its own hash, so that writing it cannot revive an ended session.
        seen = await self._redis.call("HGET", self._seen, session_h)
        session, now_ms = _read_session(raw, seen), self._clock_ms()
        if session is None or not session.is_live(now_ms):
            return None
        if used and now_ms - session.seen_ms > TOUCH_MS:
            await self._redis.call("HSET", self._seen, session_h, now_ms)
        return session

    async def sessions(self) -> Sequence[Session]:
        now_ms = self._clock_ms()
        live = [each for each in await self._all_sessions() if each.is_live(now_ms)]
        return sorted(live, key=lambda session: session.created_ms)

    async def end_sessions(self, *, session_h: str = "", key_id: str = "") -> int:
        hashes = [session_h] if session_h else []
        if key_id:
            sessions = await self._all_sessions()
            hashes += [each.session_h for each in sessions if each.key_id == key_id]
        return await self._forget(hashes)

    async def _all_sessions(self) -> Sequence[Session]:
        stored = _pairs(await self._redis.call("HGETALL", self._sessions))
        seen = _pairs(await self._redis.call("HGETALL", self._seen))
        read = (_read_session(raw, seen.get(name)) for name, raw in stored.items())
        return [session for session in read if session is not None]

    async def _forget(self, hashes: Sequence[str]) -> int:
        if not hashes:
            return 0
        gone = int(await self._redis.call("HDEL", self._sessions, *hashes))
        await self._redis.call("HDEL", self._seen, *hashes)
        return gone

    async def close(self) -> None:
        await self._redis.close()


def _optional(reply: Any) -> Any:
    """A reply about data beside the keys; an error of the server counts as no data."""
    if isinstance(reply, Exception) and not isinstance(reply, ServerError):
        raise reply
    if isinstance(reply, ServerError):
        _log.error("key_record_unreadable", error=str(reply))
    return None if isinstance(reply, ServerError) else reply


def _read_key(name: bytes, raw: bytes, quota: Any, used: Any = None) -> Key | None:
    """A stored key; None for a record that cannot be decoded."""
    try:
        key = msgspec.json.decode(raw, type=Key)
        if key.id.encode() != name:
            raise ValueError("the record has the id of another key")
    except (ValueError, RecursionError) as error:
        _log.error("key_unreadable", key_id=name.decode(errors="replace"), error=str(error))
        return None
    return msgspec.structs.replace(
        key,
        quota=key.quota if quota is None else read_quota(quota, key.id),
        last_used_ms=int(used) if used and _TIME.fullmatch(used) else 0,
    )


def _read_caller(raw: bytes | str) -> Caller | None:
    """The caller of a ticket; None for a record that cannot be decoded."""
    try:
        return msgspec.json.decode(raw, type=Caller)
    except (ValueError, RecursionError) as error:
        _log.error("ticket_unreadable", error=str(error))
        return None


def _read_session(raw: bytes, seen: bytes | None) -> Session | None:
    """A stored session; None for a record that cannot be decoded."""
    try:
        session = msgspec.json.decode(raw, type=Session)
        return msgspec.structs.replace(session, seen_ms=int(seen)) if seen else session
    except (ValueError, RecursionError):
        return None


def _pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


class SqlKeyRing:
    """The key ring of a queue on SQLite or PostgreSQL; times are the store's."""

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
        ticket = new_token()
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
        return _read_caller(rows[0]["caller"]) if rows else None

    async def open_session(self, key_id: str, ttl_ms: int, idle_ms: int) -> str:
        text = new_token()
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
        named = {"session_h": session_h, "key_id": key_id}
        return int((await self._engine.run(INBOX, "session_end", **named))[0]["gone"])

    async def close(self) -> None:
        await self._engine.close()


def _key(row: Row) -> Key | None:
    """A stored key; None for a row that cannot be read."""
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
    """The SQL key ring of a queue."""
    return SqlKeyRing(open_part(queue_url, "database"))


def open_keyring(queue_url: str) -> KeyRing:
    """The key ring of a queue: in its Redis or database, in memory for other stores."""
    url = parse_url(queue_url)
    if url.store.startswith(("sqlite", "postgres", "libsql")):
        return open_sql_keyring(queue_url)
    found = open_side_store(queue_url, "tenure-keys")
    return MemoryKeyRing() if found is None else RedisKeyRing(found[0], prefix=found[1])


def open_side_store(queue_url: str, name: str) -> tuple[Redis, str] | None:
    """The Redis of a queue and its key prefix, for data that gateways keep beside the jobs."""
    url = parse_url(queue_url)
    if not url.store.startswith(("redis", "valkey", "unix")):
        return None
    options = {name: value for name, value in url.options.items() if name in STORE_OPTIONS}
    store = url.store + (f"?{urlencode(options)}" if options else "")
    return Redis(store, name=name), url.options.get("namespace", "")


def _is_refusal(error: StoreError) -> bool:
    """Whether the user in the URL lacks the right to read the keys."""
    reply = error.reply if isinstance(error, ServerError) else ""
    return str(reply).startswith("NOPERM") or getattr(reply, "sqlstate", "") == _NO_PRIVILEGE


class _Member:
    """The ring of one store, as each of its users. The first that may use it answers.

    For a second after a failure it fails at once, so that callers do not wait.
    """

    def __init__(self, rings: Sequence[Keys]) -> None:
        self.rings = list(rings)
        self.counted: int | None = None  # None until it has answered once
        self._error: StoreError | None = None
        self._until_s = 0.0

    async def call(self, operation: Callable[[Keys], Awaitable[T]]) -> T:
        if self._error is not None and time.monotonic() < self._until_s:
            raise self._error
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await self._ask(operation)
        except (StoreError, TimeoutError) as error:
            away = error if isinstance(error, StoreError) else None
            self._error = away or StoreUnreachable("a key ring gave no answer in time")
            self._until_s = time.monotonic() + _RETRY_S
            raise self._error from None
        self._error = None
        return answer

    async def _ask(self, operation: Callable[[Keys], Awaitable[T]]) -> T:
        for ring in self.rings[:-1]:
            try:
                return await operation(ring)
            except ServerError as error:
                if not _is_refusal(error):
                    raise
        return await operation(self.rings[-1])


class JoinedKeyRings:
    """The rings of several stores as one; `stores` has the rings of each, one for every user."""

    def __init__(self, stores: Iterable[Sequence[Keys]]) -> None:
        self._members = [_Member(rings) for rings in stores]
        self._homes: dict[str, _Member] = {}

    async def find(self, key_id: str) -> Key | None:
        home = self._homes.get(key_id)
        if home is not None:
            return await home.call(lambda ring: ring.find(key_id))
        found = await _first(self._members, lambda ring: ring.find(key_id))
        if found is None:
            return None
        if len(self._homes) >= _HOMES_MAX:
            self._homes.clear()
        self._homes[key_id] = found[0]
        return found[1]

    async def count(self) -> int:
        """The keys of all rings. A ring that does not answer counts with its last known number.

        It is unknown whether a ring that never answered has keys. If no other ring has any, that
        is an error, so a request without a key is refused until every ring has answered.
        """
        failures = await asyncio.gather(*map(_recount, self._members))
        failed = [failure for failure in failures if failure is not None]
        total = sum(member.counted or 0 for member in self._members)
        never = any(member.counted is None for member in self._members)
        if len(failed) == len(self._members) or (total == 0 and never):
            raise failed[0]
        return total

    async def touch(self, key_id: str, now_ms: int) -> None:
        home = self._homes.get(key_id)
        if home is not None:
            await home.call(lambda ring: ring.touch(key_id, now_ms))

    async def issue(self, caller: Caller) -> str:
        home = self._homes.get(caller.requester)
        members = [home] if home else self._members
        found = await _first(members, lambda ring: ring.issue(caller))
        return found[1] if found else ""  # not reached: a ring issues a ticket or raises

    async def redeem(self, ticket: str) -> Caller | None:
        found = await _first(self._members, lambda ring: ring.redeem(ticket))
        return found[1] if found else None

    async def open_session(self, key_id: str, ttl_ms: int, idle_ms: int) -> str:
        home = self._homes.get(key_id)
        members = [home] if home else self._members
        found = await _first(members, lambda ring: ring.open_session(key_id, ttl_ms, idle_ms))
        return found[1] if found else ""  # not reached: a ring opens a session or raises

    async def find_session(self, session_h: str, *, used: bool = True) -> Session | None:
        found = await _first(self._members, lambda ring: ring.find_session(session_h, used=used))
        return found[1] if found else None

    async def end_sessions(self, *, session_h: str = "", key_id: str = "") -> int:
        """In every ring; fails if a ring does not answer, because it may have the session."""
        named = {"session_h": session_h, "key_id": key_id}

        async def end(member: _Member) -> int:
            try:
                return await member.call(lambda ring: ring.end_sessions(**named))
            except StoreError as error:
                if _is_refusal(error):
                    return 0
                raise

        return sum(await asyncio.gather(*map(end, self._members)))

    async def close(self) -> None:
        for member in self._members:
            for ring in member.rings:
                await ring.close()


async def _first(
    members: Sequence[_Member], operation: Callable[[Keys], Awaitable[T | None]]
) -> tuple[_Member, T] | None:
    """The first result that is not None; if there is none, the error of a ring that failed.

    A ring that refuses has nothing, unless all of them do.
    """
    failed: list[StoreError] = []
    for member in members:
        try:
            answer = await member.call(operation)
        except StoreError as error:
            failed.append(error)
            continue
        if answer is not None:
            return member, answer
    away = [error for error in failed if not _is_refusal(error)]
    if away or len(failed) == len(members):
        raise (away or failed)[0]
    return None


async def _recount(member: _Member) -> StoreError | None:
    try:
        member.counted = await member.call(lambda ring: ring.count())
    except StoreError as error:
        return error
    return None


def open_keyrings(queue_urls: Sequence[str]) -> Keys:
    """The rings of these queues, one for each store and each of its users."""
    stores: dict[tuple[str, ...], dict[str, str]] = {}  # location: URL of a queue by user
    for queue_url in queue_urls:
        url = parse_url(queue_url)
        parts = urlsplit(url.store)
        user, _, host = parts.netloc.rpartition("@")
        options = (url.options.get(name, "") for name in _LOCATION)
        location = (parts.scheme, host, parts.path, *options)
        stores.setdefault(location, {}).setdefault(user, queue_url)
    rings = [[open_keyring(url) for url in users.values()] for users in stores.values()]
    return rings[0][0] if len(rings) == len(rings[0]) == 1 else JoinedKeyRings(rings)


async def ask_once(ring: Keys) -> None:
    """Count the keys at the start of a gateway, so that a ring that refuses is logged then."""
    with suppress(StoreError):
        await ring.count()
