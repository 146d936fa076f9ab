"""For receivers of webhooks: verification, replay protection, and the page of `tenure receiver`."""

from __future__ import annotations

import asyncio
import hmac
import html
import json
import sqlite3
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Protocol

from tenure.store.files import private_database
from tenure.webhooks.signing import (
    EVENT_ID,
    NONCE,
    NONCE_FORM,
    OTHER_SIGNATURE,
    SIGNATURE,
    TIMESTAMP,
    read_secret,
    signature,
)

_KEPT_MAX = 1_000_000


class NonceStore(Protocol):
    """Remembers nonces. In Redis, `SET nonce 1 NX EX keep_s` does the same."""

    async def take(self, nonce: str, *, now_s: float, keep_s: float) -> bool:
        """True for the first call with this nonce, False for further ones within `keep_s`."""


class MemoryNonces:
    """For a receiver of one process. The nonces are lost when it ends."""

    def __init__(self) -> None:
        self._until: OrderedDict[str, float] = OrderedDict()

    async def take(self, nonce: str, *, now_s: float, keep_s: float) -> bool:
        while self._until:
            oldest, until = next(iter(self._until.items()))
            if until > now_s and len(self._until) < _KEPT_MAX:
                break  # beyond the limit old nonces are dropped, to bound the memory
            del self._until[oldest]
        if nonce in self._until:
            return False
        self._until[nonce] = now_s + keep_s
        return True


class SqliteNonces:
    """For several receiver processes on one machine. The nonces survive restarts."""

    def __init__(self, path: Path | str) -> None:
        private_database(Path(path))
        self._db = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = normal")
        self._db.executescript(_sql("create_nonces"))
        self._forget, self._insert = _sql("forget_nonces"), _sql("take_nonce")
        self._turn = asyncio.Lock()

    async def take(self, nonce: str, *, now_s: float, keep_s: float) -> bool:
        async with self._turn:
            return await asyncio.to_thread(self._take, nonce, now_s, keep_s)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def _take(self, nonce: str, now_s: float, keep_s: float) -> bool:
        self._db.execute("begin immediate")
        try:
            self._db.execute(self._forget, {"now_s": now_s})
            made = self._db.execute(self._insert, {"nonce": nonce, "until_s": now_s + keep_s})
        except BaseException:
            self._db.execute("rollback")
            raise
        self._db.execute("commit")
        return made.rowcount == 1


def _sql(name: str) -> str:
    return resources.files("tenure.webhooks").joinpath("sql", f"{name}.sql").read_text()


Reason = Literal["headers", "timestamp", "signature", "event_id", "replay"]

SKEW_S = 300
_MARGIN_S = 60
_DIGITS_MAX = 12
_SIGNATURES_MAX = 8


class InvalidWebhook(Exception):
    """The request is not genuine. `reason` is for metrics, the message for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class Verified:
    """A genuine delivery. `event` is the decoded body; `event_id` is what to deduplicate by."""

    event_id: str
    timestamp_s: int
    nonce: str
    event: dict[str, Any]


async def verify(
    body: bytes,
    headers: Mapping[str, str],
    secrets: Sequence[str | bytes],
    *,
    nonces: NonceStore,
    skew_s: int = SKEW_S,
    now_s: float | None = None,
) -> Verified:
    """Check a delivery and take its nonce; raises `InvalidWebhook`."""
    now = time.time() if now_s is None else now_s
    verified = check(body, headers, secrets, skew_s=skew_s, now_s=now)
    # Last, so that only senders with the secret can fill the store.
    if not await nonces.take(verified.nonce, now_s=now, keep_s=2 * skew_s + _MARGIN_S):
        raise InvalidWebhook("replay", "this nonce was seen before")
    return verified


def check(
    body: bytes,
    headers: Mapping[str, str],
    secrets: Sequence[str | bytes],
    *,
    skew_s: int = SKEW_S,
    now_s: float,
) -> Verified:
    """`verify` without the nonce check: pure, for receivers with another nonce store."""
    if not secrets:
        raise ValueError("give at least one secret")
    found = _headers(headers)
    timestamp, nonce, event_id = found[TIMESTAMP], found[NONCE], found[EVENT_ID]
    if abs(now_s - int(timestamp)) > skew_s:
        raise InvalidWebhook("timestamp", f"the timestamp is more than {skew_s} s away")
    signatures = f"{found[SIGNATURE]} {found.get(OTHER_SIGNATURE, '')}"
    if not _is_signed(signatures, [_key(one) for one in secrets], timestamp, nonce, body):
        raise InvalidWebhook("signature", "no signature fits the body and a live secret")
    event = _event(body)
    if event.get("event_id") != event_id:  # need not be constant-time: neither is secret
        raise InvalidWebhook("event_id", "the event id of the header is not that of the body")
    return Verified(event_id, int(timestamp), nonce, event)


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    lower = {name.lower(): value for name, value in headers.items()}
    missing = [name for name in (SIGNATURE, TIMESTAMP, NONCE, EVENT_ID) if not lower.get(name)]
    if missing:
        raise InvalidWebhook("headers", f"missing: {', '.join(missing)}")
    stamp = lower[TIMESTAMP]
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) <= _DIGITS_MAX):
        raise InvalidWebhook("headers", "the timestamp is not in seconds")
    if not NONCE_FORM.fullmatch(lower[NONCE]):
        raise InvalidWebhook("headers", "the nonce has a wrong form")
    return lower


def _is_signed(signatures: str, keys: list[bytes], timestamp: str, nonce: str, body: bytes) -> bool:
    """Compare every given signature with every expected one, in constant time."""
    given = signatures.split()[:_SIGNATURES_MAX]
    valid = False
    for key in keys:
        expected = signature(key, timestamp, nonce, body).encode()
        for one in given:
            valid |= hmac.compare_digest(expected, one.encode(errors="replace"))
    return valid


def _key(secret: str | bytes) -> bytes:
    return read_secret(secret) if isinstance(secret, str) else secret


def _event(body: bytes) -> dict[str, Any]:
    try:
        event = json.loads(body)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise InvalidWebhook("event_id", "the body is not a JSON object")
    return event


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_BODY_BYTES_MAX = 1_000_000
_KEPT = 200
_EVENTS_KEPT = 100_000
_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'"),
]
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .7rem .3rem 0}
tr{border-bottom:1px solid #d8dee4}.verified{color:#116329}.refused{color:#a40e26}
.repeated{color:#7d4e00}
"""
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta http-equiv="refresh" content="2"><title>Webhooks received</title><style>{style}</style>
<h1>Webhooks received</h1><p>{summary}</p>
<table><tr><th>Time<th>Verdict<th>Job<th>No.<th>Status<th>Event</tr>{rows}</table></html>"""


@dataclass(frozen=True, slots=True)
class Shown:
    """One delivery: verified, repeated (a known event), or refused with a reason."""

    at_s: float
    verdict: str
    reason: str = ""
    job_id: str = ""
    seq: int = 0
    status: str = ""
    event_id: str = ""


class ReceiverPage:
    """The ASGI application; `shown` has the newest delivery first."""

    def __init__(self, secrets: Sequence[str | bytes]) -> None:
        self._secrets = list(secrets)
        self._nonces = MemoryNonces()
        self._events: dict[str, None] = {}
        self.shown: deque[Shown] = deque(maxlen=_KEPT)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request; other protocols are ignored."""
        if scope["type"] != "http":
            return
        match scope["method"], scope["path"]:
            case "POST", "/hooks":
                await self._take(scope, receive, send)
            case "GET", "/":
                await _answer(send, 200, self._page().encode(), b"text/html; charset=utf-8")
            case "GET", "/deliveries":
                body = json.dumps([asdict(one) for one in self.shown]).encode()
                await _answer(send, 200, body, b"application/json")
            case _:
                await _answer(send, 404)

    async def _take(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        if body is None:
            await _answer(send, 413)
            return
        headers = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]
        }
        try:
            verified = await verify(body, headers, self._secrets, nonces=self._nonces)
        except InvalidWebhook as refused:
            self.shown.appendleft(Shown(time.time(), "refused", refused.reason))
            await _answer(send, 401)
            return
        known = verified.event_id in self._events
        self._events[verified.event_id] = None
        if len(self._events) > _EVENTS_KEPT:
            del self._events[next(iter(self._events))]
        self.shown.appendleft(_shown(verified.event, "repeated" if known else "verified"))
        await _answer(send, 204)

    def _page(self) -> str:
        counts = dict.fromkeys(("verified", "repeated", "refused"), 0)
        for one in self.shown:
            counts[one.verdict] += 1
        summary = ", ".join(f"{count} {word}" for word, count in counts.items())
        return _PAGE.format(style=_STYLE, summary=summary, rows="".join(map(_row, self.shown)))


def _shown(event: dict[str, Any], verdict: str) -> Shown:
    seq = event.get("seq")
    return Shown(
        time.time(),
        verdict,
        job_id=str(event.get("job_id", ""))[:100],
        seq=seq if isinstance(seq, int) else 0,
        status=str(event.get("status", ""))[:40],
        event_id=str(event["event_id"])[:200],
    )


def _row(one: Shown) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(one.at_s))
    verdict = f"{one.verdict} ({one.reason})" if one.reason else one.verdict
    cells = [one.job_id, str(one.seq or ""), one.status, one.event_id]
    rest = "".join(f"<td>{html.escape(cell)}" for cell in cells)
    return f'<tr><td>{when}<td class="{one.verdict}">{html.escape(verdict)}{rest}</tr>'


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None if it is too long or the sender disconnected."""
    kept = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        kept += bytes(message.get("body", b""))
        if len(kept) > _BODY_BYTES_MAX:
            return None
        if not message.get("more_body"):
            return kept


async def _answer(send: Send, status: int, body: bytes = b"", kind: bytes = b"text/plain") -> None:
    headers = [(b"content-type", kind), *_HEADERS] if body else list(_HEADERS)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
