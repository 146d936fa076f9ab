"""Sessions of browsers: a cookie that a key has signed, for pages that cannot send headers.

The cookie holds the key's id and an end, signed with what the ring keeps of the key. So every
gateway of a queue understands it without keeping anything, it ends with its key, and whoever steals
it has no key. Browsers send it to us alone (SameSite), and a request that another site's page sent
is refused besides.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from http.cookies import CookieError, SimpleCookie

from starlette.requests import Request

from leasehold.core.endpoint import Caller
from leasehold.gateway.auth import Door
from leasehold.gateway.dispatch import headers_of
from leasehold.gateway.keys import Key
from leasehold.gateway.problems import Problem

COOKIE = "leasehold_session"
SESSION_S = 12 * 3600


class Sessions:
    """The doorkeeper of the dashboard."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def caller(self, request: Request) -> Caller | None:
        """By session, else as the API would admit; None for somebody who has to sign in."""
        headers = headers_of(request.scope)
        check_own_page(request.method, headers)
        cookie = _cookie(headers.get("cookie", ""))
        if cookie:
            caller = await self._by_session(cookie)
            if caller is not None:
                return caller
        try:
            acts = request.method not in ("GET", "HEAD")
            return await self._door.admit(request.scope, headers, acts=acts)
        except Problem as problem:
            if problem.status == 401:
                return None
            raise

    async def sign_in(self, key_text: str, request: Request) -> str | None:
        """The cookie of a new session, or None for a key that is no good."""
        headers = headers_of(request.scope)
        check_own_page(request.method, headers)
        try:
            caller = await self._door.by_key(key_text)
        except Problem:
            return None
        key = await self._door.live_key(caller.requester)
        if key is None:
            return None
        until_s = int(time.time()) + SESSION_S
        # The browser's own word: behind a proxy that ends TLS our scheme would say http.
        secure = headers.get("origin", "").startswith("https://")
        return _set_cookie(f"{key.id}.{until_s}.{_signature(key, until_s)}", SESSION_S, secure)

    def sign_out(self) -> str:
        """The cookie that takes the session's place."""
        return _set_cookie("", 0, secure=False)

    async def _by_session(self, text: str) -> Caller | None:
        key_id, _, rest = text.partition(".")
        until, _, signature = rest.partition(".")
        if not until.isdecimal() or int(until) < time.time():
            return None
        key = await self._door.live_key(key_id)
        if key is None or not hmac.compare_digest(signature, _signature(key, int(until))):
            return None
        return Caller(key.id, frozenset(key.scopes))


def _set_cookie(value: str, max_age_s: int, secure: bool) -> str:
    only_tls = "; Secure" if secure else ""
    return f"{COOKIE}={value}; Path=/; Max-Age={max_age_s}; HttpOnly; SameSite=Strict{only_tls}"


def check_own_page(method: str, headers: dict[str, str]) -> None:
    """Refuse what another site's page sent; a form must come from a page of ours."""
    site = headers.get("sec-fetch-site", "")
    if method in ("GET", "HEAD"):
        # A link from elsewhere may lead here; a frame or a script from elsewhere may not.
        if site in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            raise Problem("cross_site")
        return
    if site:
        if site != "same-origin":
            raise Problem("cross_site")
        return
    origin = headers.get("origin", "")
    if origin.partition("://")[2] != headers.get("host", "-"):
        raise Problem("cross_site", "a form has to come from a page of this gateway")


def _signature(key: Key, until_s: int) -> str:
    words = f"leasehold session {key.id} {until_s}".encode()
    return hmac.new(key.secret_h.encode(), words, hashlib.sha256).hexdigest()


def _cookie(text: str) -> str:
    try:
        found = SimpleCookie(text).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""
