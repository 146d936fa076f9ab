"""API keys (`tn_<id>_<secret>`), tickets and sessions, and a key ring in memory.

A key is shown once and stored as a hash. A key ring is stored beside the jobs of a queue, so that
all gateways of the queue share it and `tenure keys` needs no gateway. A ticket is valid for one
request within a minute and may appear in a URL; a key must not. A session replaces the key in a
browser: a random id, stored as a hash with the times at which it ends.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from hmac import compare_digest
from typing import Annotated, Protocol

import msgspec
import structlog

from tenure.core.endpoint import SCOPES, STREAM_SCOPE, Caller
from tenure.core.errors import UsageError
from tenure.dashboard.display import now_ms
from tenure.gateway.limits import Quota

_log = structlog.get_logger("tenure.gateway")
TICKET_S = 60
TOUCH_MS = 60_000
"""The last use of a key or a session is stored at most this often."""

SESSIONS_PER_KEY = 100
_SECRET_BYTES = 32
_ID_BYTES = 6

_TimeMs = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_000)]  # until the year 9999


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A stored key. Times are Unix milliseconds, 0 for never."""

    id: str
    name: str
    scopes: tuple[str, ...]
    secret_h: str
    created_ms: _TimeMs
    expires_ms: _TimeMs = 0
    last_used_ms: _TimeMs = 0
    quota: Quota = Quota()

    def is_live(self, now_ms: int) -> bool:
        """False once it has expired."""
        return not self.expires_ms or now_ms < self.expires_ms


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A stored session. It ends at `expires_ms`, or `idle_ms` after its last use."""

    session_h: str
    key_id: str
    created_ms: int
    expires_ms: int
    idle_ms: int
    seen_ms: int

    def is_live(self, now_ms: int) -> bool:
        """False once it is over."""
        return now_ms < min(self.expires_ms, self.seen_ms + self.idle_ms)


class Keys(Protocol):
    """What a gateway needs of one or several key rings."""

    async def find(self, key_id: str) -> Key | None:
        """One key, expired or not; `last_used_ms` is not set."""

    async def count(self) -> int:
        """How many keys there are."""

    async def touch(self, key_id: str, now_ms: int) -> None:
        """Store the time of the last use of a key."""

    async def issue(self, caller: Caller) -> str:
        """A ticket that is valid for one request of the caller within `TICKET_S` seconds."""

    async def redeem(self, ticket: str) -> Caller | None:
        """The caller of a ticket, which is then used up; None for an invalid one."""

    async def open_session(self, key_id: str, ttl_ms: int, idle_ms: int) -> str:
        """The id of a new session; only its hash is stored."""

    async def find_session(self, session_h: str, *, used: bool = True) -> Session | None:
        """A session by the hash of its id, None once it has ended; `used` prolongs it."""

    async def end_sessions(self, *, session_h: str = "", key_id: str = "") -> int:
        """End one session, or all sessions of a key; returns their number."""

    async def close(self) -> None:
        """Close the connections."""


class KeyRing(Keys, Protocol):
    """Keys, tickets and sessions of one store."""

    async def create(
        self, scopes: Iterable[str], name: str, ttl_ms: int | None = None
    ) -> tuple[Key, str]:
        """A new key and its full text, which is not stored."""

    async def limit(self, key_id: str, quota: Quota) -> bool:
        """Set the quota of a key; False for an unknown key. Takes effect within two seconds."""

    async def list(self) -> list[Key]:
        """All keys, oldest first, with the minute of their last use."""

    async def revoke(self, key_id: str) -> bool:
        """Remove a key with its sessions; False for an unknown key.

        Every gateway refuses it within two seconds.
        """

    async def sessions(self) -> Sequence[Session]:
        """All live sessions, oldest first."""


def new_token() -> str:
    """The text of a ticket or a session; stores keep its hash."""
    return secrets.token_urlsafe(_SECRET_BYTES)


def new_session(key_id: str, ttl_ms: int, idle_ms: int, now_ms: int) -> tuple[Session, str]:
    """A new session and its id."""
    text = new_token()
    session = Session(
        session_h=secret_hash(text),
        key_id=key_id,
        created_ms=now_ms,
        expires_ms=now_ms + ttl_ms,
        idle_ms=idle_ms,
        seen_ms=now_ms,
    )
    return session, text


def surplus_sessions(sessions: Iterable[Session], key_id: str, now_ms: int) -> list[str]:
    """Hashes of ended sessions, and of the oldest ones of a key that would exceed its limit."""
    newest = sorted(sessions, key=lambda session: session.created_ms, reverse=True)
    own = [each.session_h for each in newest if each.key_id == key_id and each.is_live(now_ms)]
    over = [each.session_h for each in newest if not each.is_live(now_ms)]
    return over + own[SESSIONS_PER_KEY - 1 :]


def check_scopes(scopes: Iterable[str]) -> tuple[str, ...]:
    """The scopes without repetition; refuses unknown scopes, and keys without a scope."""
    chosen = tuple(dict.fromkeys(scopes))
    streams = [scope for scope in chosen if scope.startswith(STREAM_SCOPE)]
    unknown = [scope for scope in chosen if scope not in SCOPES and scope not in streams]
    if unknown or len(streams) == len(chosen):
        problem = f"unknown scope {unknown[0]!r}" if unknown else "a key needs a scope"
        raise UsageError(
            f"{problem}; the scopes are {', '.join(SCOPES)}; {STREAM_SCOPE}NAME beside them keeps "
            "a key to streams of the plane"
        )
    return chosen


def new_key(scopes: Iterable[str], name: str, ttl_ms: int | None, now_ms: int) -> tuple[Key, str]:
    """A new key and its text; refuses unknown scopes and keys without a scope."""
    chosen = check_scopes(scopes)
    if ttl_ms is not None and ttl_ms <= 0:
        raise UsageError(f"a key lives for a positive time, not {ttl_ms} ms")
    key_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_hex(_SECRET_BYTES)
    key = Key(
        id=key_id,
        name=name,
        scopes=chosen,
        secret_h=secret_hash(secret),
        created_ms=now_ms,
        expires_ms=now_ms + ttl_ms if ttl_ms else 0,
    )
    return key, f"tn_{key_id}_{secret}"


def secret_hash(secret: str) -> str:
    """SHA-256. It is enough for 256 random bits; slow hashes are for passwords."""
    return hashlib.sha256(secret.encode()).hexdigest()


def split_key(text: str) -> tuple[str, str] | None:
    """The id and the secret in the text of a key; None if it is not a key."""
    prefix, _, rest = text.partition("_")
    key_id, _, secret = rest.partition("_")
    if prefix != "tn" or len(key_id) != 2 * _ID_BYTES or len(secret) != 2 * _SECRET_BYTES:
        return None
    return (key_id, secret) if key_id.isalnum() and key_id.isascii() else None


def worker_key(text: str) -> Key:
    """The key that a gateway was started with. It is in no ring and has only `jobs:work`."""
    parts = split_key(text)
    if parts is None:
        raise UsageError("the key for workers is not a key; a key looks like tn_..._...")
    key_id, secret = parts
    scopes = ("jobs:work",)
    return Key(id=key_id, name="workers", scopes=scopes, secret_h=secret_hash(secret), created_ms=0)


def is_secret_of(key: Key, secret: str) -> bool:
    """Whether this is the secret of the key, compared in constant time."""
    return compare_digest(key.secret_h.encode(), secret_hash(secret).encode())


class MemoryKeyRing:
    """The ring of a gateway whose store is the memory of its process."""

    def __init__(self, *, clock_ms: Callable[[], int] = now_ms) -> None:
        self._clock_ms = clock_ms
        self._keys: dict[str, Key] = {}
        self._tickets: dict[str, tuple[int, Caller]] = {}
        self._sessions: dict[str, Session] = {}

    async def create(
        self, scopes: Iterable[str], name: str, ttl_ms: int | None = None
    ) -> tuple[Key, str]:
        key, text = new_key(scopes, name, ttl_ms, self._clock_ms())
        self._keys[key.id] = key
        return key, text

    async def limit(self, key_id: str, quota: Quota) -> bool:
        if key_id not in self._keys:
            return False
        self._keys[key_id] = msgspec.structs.replace(self._keys[key_id], quota=quota)
        return True

    async def list(self) -> list[Key]:
        return list(self._keys.values())

    async def revoke(self, key_id: str) -> bool:
        await self.end_sessions(key_id=key_id)
        return self._keys.pop(key_id, None) is not None

    async def find(self, key_id: str) -> Key | None:
        return self._keys.get(key_id)

    async def count(self) -> int:
        return len(self._keys)

    async def touch(self, key_id: str, now_ms: int) -> None:
        if key_id in self._keys:
            self._keys[key_id] = msgspec.structs.replace(self._keys[key_id], last_used_ms=now_ms)

    async def issue(self, caller: Caller) -> str:
        now_ms = self._clock_ms()
        self._tickets = {text: entry for text, entry in self._tickets.items() if entry[0] > now_ms}
        ticket = new_token()
        self._tickets[secret_hash(ticket)] = (now_ms + TICKET_S * 1000, caller)
        return ticket

    async def redeem(self, ticket: str) -> Caller | None:
        until_ms, caller = self._tickets.pop(secret_hash(ticket), (0, None))
        return caller if until_ms > self._clock_ms() else None

    async def open_session(self, key_id: str, ttl_ms: int, idle_ms: int) -> str:
        now_ms = self._clock_ms()
        for session_h in surplus_sessions(self._sessions.values(), key_id, now_ms):
            del self._sessions[session_h]
        session, text = new_session(key_id, ttl_ms, idle_ms, now_ms)
        self._sessions[session.session_h] = session
        return text

    async def find_session(self, session_h: str, *, used: bool = True) -> Session | None:
        session, now_ms = self._sessions.get(session_h), self._clock_ms()
        if session is None or not session.is_live(now_ms):
            return None
        if used:
            self._sessions[session_h] = msgspec.structs.replace(session, seen_ms=now_ms)
        return session

    async def sessions(self) -> Sequence[Session]:
        return [each for each in self._sessions.values() if each.is_live(self._clock_ms())]

    async def end_sessions(self, *, session_h: str = "", key_id: str = "") -> int:
        ended = [h for h, s in self._sessions.items() if h == session_h or s.key_id == key_id]
        for each in ended:
            del self._sessions[each]
        return len(ended)

    async def close(self) -> None:
        """There is nothing to close."""
