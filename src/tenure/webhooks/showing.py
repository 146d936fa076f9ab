"""A receiver with a page: it verifies what arrives and shows the last deliveries.

For trying webhooks out, and for `tenure receiver`. It is an ASGI application without further
needs: POST /hooks receives, GET / is the page, GET /deliveries is the same as JSON.
"""

from __future__ import annotations

import html
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tenure.webhooks.receiving import InvalidWebhook, verify
from tenure.webhooks.replay import MemoryNonces

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
    """One delivery: verified, repeated (its event was seen before), or refused with a reason."""

    at_s: float
    verdict: str
    reason: str = ""
    job_id: str = ""
    seq: int = 0
    status: str = ""
    event_id: str = ""


class ReceiverPage:
    """The application; `shown` holds the newest delivery first."""

    def __init__(self, secrets: Sequence[str | bytes]) -> None:
        self._secrets = list(secrets)
        self._nonces = MemoryNonces()
        self._events: dict[str, None] = {}
        self.shown: deque[Shown] = deque(maxlen=_KEPT)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; anything but HTTP is left alone."""
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
    """The whole body, or None when it is too long or the sender went away."""
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
