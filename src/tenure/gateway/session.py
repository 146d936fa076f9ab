"""Sessions of browsers: a cookie with a random id, for pages that cannot send headers.

The store keeps the hash of the id, the key that opened the session, and the dates at which it ends;
so every gateway of a queue understands it, it ends with its key or by signing out, and what can be
read in the store opens nothing. Browsers send the cookie to us alone (SameSite), and a request that
another site's page sent is refused besides.
"""

from __future__ import annotations

import re

import structlog
from starlette.requests import Request

from tenure.core.endpoint import Caller
from tenure.gateway.auth import Door, check_own_page
from tenure.gateway.dispatch import headers_of
from tenure.gateway.keys import Keys, secret_hash
from tenure.gateway.problems import Problem
from tenure.gateway.settings import GatewaySettings

_log = structlog.get_logger("tenure.gateway")

COOKIE = "tenure_session"
_SESSION = "tenure.session"  # where a request keeps by which session it was admitted
_COOKIE_CHARS_MAX = 8_192
# Only what an id can look like is looked for: whatever else a cookie holds is nothing to parse.
_ID = re.compile(rf"(?:^|;) ?{COOKIE}=([\w-]{{43}}) ?(?:;|$)", re.ASCII)


class Sessions:
    """The doorkeeper of the dashboard."""

    def __init__(self, door: Door, ring: Keys, settings: GatewaySettings) -> None:
        self._door = door
        self._ring = ring
        self._ttl_ms = settings.session_ms
        self._idle_ms = settings.session_idle_ms

    async def caller(self, request: Request) -> Caller | None:
        """By session, else as the API would admit; None for somebody who has to sign in."""
        headers = headers_of(request.scope)
        check_own_page(request.method, headers)
        session_h = _session_h(headers)
        if session_h:
            caller = await self._by_session(session_h)
            if caller is not None:
                request.scope[_SESSION] = session_h
                return caller
        try:
            acts = request.method not in ("GET", "HEAD")
            return await self._door.admit(request.scope, headers, acts=acts)
        except Problem as problem:
            if problem.status == 401:
                return None
            raise

    async def is_still_in(self, request: Request, caller: Caller) -> bool:
        """Whether a caller whom a request brought would be admitted now; that is no use of it."""
        session_h = request.scope.get(_SESSION)
        if session_h:
            return await self._by_session(session_h, used=False) is not None
        return await self._door.is_valid(caller)

    async def sign_in(self, key_text: str, request: Request) -> str | None:
        """The cookie of a new session, or None for a key that is no good."""
        headers = headers_of(request.scope)
        check_own_page(request.method, headers)
        try:
            caller = await self._door.by_key(key_text, request.scope, headers, way="login")
        except Problem as problem:
            if problem.status == 401:
                return None
            raise
        text = await self._ring.open_session(caller.requester, self._ttl_ms, self._idle_ms)
        address = self._door.address(request.scope, headers)
        _log.info("signed_in", key=caller.requester, address=address)
        # The browser's own word: behind a proxy that ends TLS our scheme would say http.
        secure = headers.get("origin", "").startswith("https://")
        return _set_cookie(text, self._ttl_ms // 1000, secure)

    async def sign_out(self, request: Request) -> str:
        """End the session; the cookie that takes its place."""
        headers = headers_of(request.scope)
        check_own_page(request.method, headers)
        session_h = _session_h(headers)
        if session_h:
            await self._ring.end_sessions(session_h=session_h)
        return _set_cookie("", 0, secure=False)

    async def _by_session(self, session_h: str, *, used: bool = True) -> Caller | None:
        session = await self._ring.find_session(session_h, used=used)
        key = await self._door.live_key(session.key_id) if session is not None else None
        return Caller(key.id, frozenset(key.scopes)) if key is not None else None


def _set_cookie(value: str, max_age_s: int, secure: bool) -> str:
    only_tls = "; Secure" if secure else ""
    return f"{COOKIE}={value}; Path=/; Max-Age={max_age_s}; HttpOnly; SameSite=Strict{only_tls}"


def _session_h(headers: dict[str, str]) -> str:
    """What the store keeps of the session in a cookie; "" where there is none."""
    found = _ID.search(headers.get("cookie", "")[:_COOKIE_CHARS_MAX])
    return secret_hash(found.group(1)) if found else ""
