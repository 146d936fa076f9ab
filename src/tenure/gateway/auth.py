"""Authentication: by API key, ticket, session cookie or trusted proxy, or anonymous on loopback.

Without keys the gateway is open to local programs only: it must be bound to loopback, the client
must connect from there without a proxy in between, and the request must not come from another
site's page (Host, Origin and Sec-Fetch-Site are checked). Once a key exists, a key is required.
Lookups of keys are cached for a second, so a revoked key is refused within two.

Proxy headers are read only if the connection comes from a configured address. A person has the
rights of the first configured group that matches; the rights of several groups are not combined.

A session is a cookie with a random id, for pages that cannot send headers. The store keeps only the
hash of the id: every gateway of the queue accepts it, and a copy of the store opens no session.
"""

from __future__ import annotations

import inspect
import ipaddress
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import TypeAlias
from urllib.parse import parse_qs

import msgspec
import structlog
from starlette.requests import Request
from starlette.types import Scope

from tenure.core.endpoint import SCOPES, Caller
from tenure.core.errors import UsageError
from tenure.dashboard.api import BASE
from tenure.dashboard.display import now_ms
from tenure.gateway.keys import (
    TOUCH_MS,
    Key,
    Keys,
    check_scopes,
    is_secret_of,
    secret_hash,
    split_key,
    worker_key,
)
from tenure.gateway.limits import FailedLogins, Quota, RateLimit
from tenure.gateway.problems import Problem
from tenure.gateway.settings import UNIX, GatewaySettings, is_local_host, is_loopback
from tenure.store.batcher import CachedLookup

_log = structlog.get_logger("tenure.gateway")

CACHE_S = 1.0
_ANONYMOUS = Caller("", frozenset(SCOPES))
_NO_QUOTA = Quota()
_SIGN_INS = Quota(rate_per_s=0.5, rate_burst=60)  # each is a stored session and a line of the log
_CHALLENGE = (("www-authenticate", 'Bearer realm="tenure"'),)
_PROXY_HEADERS = frozenset(
    [
        "via",
        "forwarded",
        "x-real-ip",
        "x-client-ip",
        "true-client-ip",
        "cf-connecting-ip",
        "cdn-loop",
    ]
)
_HOPS_MAX = 32
_HEADER_CHARS_MAX = 4_096
_SSO = "sso:"
_COOKIE = "tenure_session"
_COOKIE_CHARS_MAX = 8_192
# Matches only what a session id looks like, so that no cookie has to be parsed.
_SESSION_ID = re.compile(rf"(?:^|;) ?{_COOKIE}=([\w-]{{43}}) ?(?:;|$)", re.ASCII)
_SESSION = "tenure.session"  # scope key: the session by which a request was admitted

CallerHook: TypeAlias = Callable[[Request], Caller | Awaitable[Caller | None] | None]
"""Names the caller of a request by an application's own authentication.

None leaves the request to keys, tickets and sessions.
"""


class Auth:
    """Authenticates requests. One per gateway process."""

    def __init__(
        self, ring: Keys, settings: GatewaySettings, hook: CallerHook | None = None
    ) -> None:
        self._ring = ring
        self._hook = hook
        self._proxies = _TrustedProxies(settings)
        self._failed = FailedLogins(settings.failed_logins_per_min)
        sso = self._proxies.has_sso
        self._open = settings.anonymous and settings.on_loopback and not sso and hook is None
        self._unix = bool(settings.unix_socket)
        self._worker_key = worker_key(settings.worker_key) if settings.worker_key else None
        self._quota = settings.quota
        self._keys = CachedLookup(self._read_key, keep_s=CACHE_S)
        self._counts = CachedLookup(lambda _: ring.count(), keep_s=CACHE_S)
        self._touched_ms: dict[str, int] = {}

    async def admit(
        self, scope: Scope, headers: Mapping[str, str], *, acts: bool = False
    ) -> Caller:
        """The caller of a request; raises `Problem` 401 or 403.

        `acts` is true for a request that changes something; a ticket does not permit that, because
        others may see its URL.
        """
        if self._hook is not None:
            caller = await self._by_hook(self._hook, scope)
            if caller is not None:
                # No page of another site can make a browser send a token. Passwords (Basic, Digest,
                # Negotiate) the browser sends by itself, as it does a cookie.
                if not headers.get("authorization", "").lower().startswith("bearer "):
                    _check_own_page(scope["method"], headers, form=False)
                return caller
        text = _key_text(headers)
        if text:
            return await self.by_key(text, scope, headers)
        ticket = _ticket(scope)
        if ticket:
            if acts:
                raise Problem("scope", "a ticket is only valid for reading; send the key itself")
            return await self._by_ticket(ticket, scope, headers)
        person = self._proxies.person(scope)
        if person is not None:
            _check_own_page(scope["method"], headers, form=False)
            if not person.requester.startswith(_SSO):
                await self._find(person.requester)  # `quota` needs the key of the tenant
            return person
        if not self._open or await self._counts.get(""):
            raise Problem("no_key", headers=_CHALLENGE)
        self._check_local(scope, headers)
        return _ANONYMOUS

    async def live_key(self, key_id: str) -> Key | None:
        """A key by its id, if it may be used now."""
        key = await self._find(key_id)
        return key if key is not None and key.is_live(now_ms()) else None

    def quota(self, requester: str) -> Quota:
        """The quota of a caller who was just admitted."""
        key = self._keys.last(requester)
        return self._quota if key is None or key.quota == _NO_QUOTA else key.quota.over(self._quota)

    async def is_valid(self, caller: Caller) -> bool:
        """Whether a caller who was admitted earlier would be admitted now."""
        if caller.person:
            return self._proxies.has_sso or self._hook is not None
        if not caller.requester:
            return self._open and not await self._counts.get("")
        return await self.live_key(caller.requester) is not None

    async def by_key(
        self, text: str, scope: Scope, headers: Mapping[str, str], *, way: str = "api"
    ) -> Caller:
        """The caller with this key; raises `Problem` 401, or 429 after too many wrong keys."""
        parts = split_key(text)
        key = await self._find(parts[0]) if parts else None
        used_ms = now_ms()
        if not parts or not key or not is_secret_of(key, parts[1]) or not key.is_live(used_ms):
            raise self._refused(parts[0] if parts else "", scope, headers, way)
        if key is not self._worker_key and used_ms - self._touched_ms.get(key.id, 0) > TOUCH_MS:
            self._touched_ms[key.id] = used_ms
            await self._ring.touch(key.id, used_ms)
        return Caller(key.id, frozenset(key.scopes))

    async def _by_hook(self, hook: CallerHook, scope: Scope) -> Caller | None:
        found = hook(Request(scope))
        caller = await found if inspect.isawaitable(found) else found
        if caller is None:
            return None
        if not caller.requester:
            raise TypeError("the caller hook returned a Caller without `requester`")
        # `person` marks the caller as one whom no key ring knows.
        return Caller(caller.requester, frozenset(caller.scopes), caller.person or caller.requester)

    async def _by_ticket(self, ticket: str, scope: Scope, headers: Mapping[str, str]) -> Caller:
        caller = await self._ring.redeem(ticket)
        if caller is None or not await self.is_valid(caller):
            raise self._refused("", scope, headers, "ticket")
        return caller

    def address(self, scope: Scope, headers: Mapping[str, str]) -> str:
        """The address of the client."""
        return self._proxies.address(scope, headers)

    def _refused(self, key_id: str, scope: Scope, headers: Mapping[str, str], way: str) -> Problem:
        self._failed.note(self.address(scope, headers), key_id, way)
        return Problem("bad_key", headers=_CHALLENGE)

    async def _find(self, key_id: str) -> Key | None:
        if self._worker_key is not None and key_id == self._worker_key.id:
            return self._worker_key
        return await self._keys.get(key_id)

    async def _read_key(self, key_id: str) -> Key | None:
        return await self._ring.find(key_id)

    def _check_local(self, scope: Scope, headers: Mapping[str, str]) -> None:
        client = scope.get("client")
        if not self._unix and (client is None or not is_loopback(client[0])):
            raise Problem("no_key", headers=_CHALLENGE)
        # nginx sends HTTP/1.0 to upstream servers; by default nothing else shows that it is there.
        proxied = scope["http_version"] == "1.0" or not _PROXY_HEADERS.isdisjoint(headers)
        if proxied or "x-forwarded" in " ".join(headers):
            raise Problem(
                "no_key", "behind a proxy this gateway needs API keys", headers=_CHALLENGE
            )
        host = headers.get("host", "")
        is_local = self._unix or is_local_host(host)
        if len(headers) < len(scope["headers"]):  # a header was sent twice
            is_local = is_local and sum(name == b"host" for name, _ in scope["headers"]) < 2
        if not is_local:
            raise Problem("cross_site", "Host is not a name of this machine; use 127.0.0.1")
        origin = headers.get("origin", "")
        if origin and origin.partition("://")[2] != host:
            raise Problem("cross_site")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Problem("cross_site")


class Sessions:
    """Authenticates the dashboard's pages; implements its protocol `SessionAuth`."""

    def __init__(self, auth: Auth, ring: Keys, settings: GatewaySettings) -> None:
        self._auth = auth
        self._ring = ring
        self._ttl_ms = settings.session_ms
        self._idle_ms = settings.session_idle_ms
        self._rate = RateLimit(code="login_limited", says=lambda *_: "this key signs in too often")

    async def caller(self, request: Request) -> Caller | None:
        """By session, otherwise as for the API; None for a caller who has to sign in."""
        headers = headers_of(request.scope)
        _check_own_page(request.method, headers)
        session_h = _session_h(headers)
        if session_h:
            caller = await self._by_session(session_h)
            if caller is not None:
                request.scope[_SESSION] = session_h
                return caller
        try:
            acts = request.method not in ("GET", "HEAD")
            return await self._auth.admit(request.scope, headers, acts=acts)
        except Problem as problem:
            if problem.status == 401:
                return None
            raise

    async def is_still_valid(self, request: Request, caller: Caller) -> bool:
        """Whether the caller of an earlier request would be admitted now.

        Does not count as a use of the session.
        """
        session_h = request.scope.get(_SESSION)
        if session_h:
            return await self._by_session(session_h, used=False) is not None
        return await self._auth.is_valid(caller)

    async def sign_in(self, key_text: str, request: Request) -> str | None:
        """The cookie of a new session; None for a wrong key."""
        headers = headers_of(request.scope)
        _check_own_page(request.method, headers)
        try:
            caller = await self._auth.by_key(key_text, request.scope, headers, way="login")
        except Problem as problem:
            if problem.status == 401:
                return None
            raise
        self._rate.take(caller.requester, _SIGN_INS)
        text = await self._ring.open_session(caller.requester, self._ttl_ms, self._idle_ms)
        address = self._auth.address(request.scope, headers)
        _log.info("signed_in", key=caller.requester, address=address)
        # Origin has the browser's scheme. Behind a proxy that ends TLS, our own scheme is http.
        secure = headers.get("origin", "").startswith("https://")
        return _set_cookie(text, self._ttl_ms // 1000, secure, request)

    async def sign_out(self, request: Request) -> str:
        """End the session; returns the cookie that removes the browser's."""
        headers = headers_of(request.scope)
        _check_own_page(request.method, headers)
        session_h = _session_h(headers)
        if session_h:
            await self._ring.end_sessions(session_h=session_h)
        return _set_cookie("", 0, False, request)

    async def _by_session(self, session_h: str, *, used: bool = True) -> Caller | None:
        session = await self._ring.find_session(session_h, used=used)
        key = await self._auth.live_key(session.key_id) if session is not None else None
        return Caller(key.id, frozenset(key.scopes)) if key is not None else None


def _set_cookie(value: str, max_age_s: int, secure: bool, request: Request) -> str:
    path = request.scope.get(BASE) or "/"
    kept = f"{_COOKIE}={value}; Path={path}; Max-Age={max_age_s}; HttpOnly; SameSite=Strict"
    return kept + ("; Secure" if secure else "")


def _session_h(headers: dict[str, str]) -> str:
    """The hash of the session id in the cookie; "" without a session."""
    found = _SESSION_ID.search(headers.get("cookie", "")[:_COOKIE_CHARS_MAX])
    return secret_hash(found.group(1)) if found else ""


class _Group(msgspec.Struct, frozen=True):
    """What members of a group may do. Their jobs belong to them, or to `tenant` if it is set."""

    name: str
    scopes: frozenset[str]
    tenant: str = ""


class _TrustedProxies:
    """The trusted proxies, and the groups of the people whom they authenticate."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._networks = settings.proxy_networks
        self._unix = UNIX in settings.trusted_proxies
        self._groups = [_group(text) for text in settings.sso_groups]
        self._user = settings.sso_user_header.lower()
        self._member_of = settings.sso_groups_header.lower()
        if self._groups and not settings.trusted_proxies:
            raise UsageError(
                "gateway.sso_groups needs gateway.trusted_proxies: the addresses of the proxies "
                "whose headers name people"
            )

    @property
    def has_sso(self) -> bool:
        """Whether people sign in at a proxy; then no request is admitted without an identity."""
        return bool(self._groups)

    def address(self, scope: Scope, headers: Mapping[str, str]) -> str:
        """The address of the client: the peer, or the client that trusted proxies name."""
        client = scope.get("client")
        peer: str = client[0] if client else UNIX
        if not self._trusts(peer):
            return peer
        hops = headers.get("x-forwarded-for", "").rsplit(",", _HOPS_MAX)[-_HOPS_MAX:]
        for hop in reversed(hops):
            text = hop.strip()
            if _parse_address(text) is None:
                break
            peer = text
            if not self._trusts(text):
                break
        return peer

    def person(self, scope: Scope) -> Caller | None:
        """The person whom a trusted proxy names; None without a person or a trusted proxy."""
        client = scope.get("client")
        if not self._groups or not self._trusts(client[0] if client else UNIX):
            return None
        user = _single_header(scope, self._user)
        if not user:
            return None
        groups = {name.strip() for name in _single_header(scope, self._member_of).split(",")}
        for group in self._groups:
            if group.name in groups or group.name == "*":
                return Caller(group.tenant or f"{_SSO}{user}", group.scopes, user)
        raise Problem("scope", "gateway.sso_groups names none of this person's groups")

    def _trusts(self, peer: str) -> bool:
        if peer == UNIX:
            return self._unix
        address = _parse_address(peer)
        return address is not None and any(address in network for network in self._networks)


def _check_own_page(method: str, headers: Mapping[str, str], *, form: bool = True) -> None:
    """Refuse a request that a page of another site sent; a form must come from our own page.

    With `form` False a program may have sent it, which sends neither Origin nor Sec-Fetch-Site.
    """
    site = headers.get("sec-fetch-site", "")
    if method in ("GET", "HEAD"):
        # Links from other sites are allowed; their frames and scripts are not.
        if site in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            raise Problem("cross_site")
        return
    if site:
        if site != "same-origin":
            raise Problem("cross_site")
        return
    origin = headers.get("origin", "")
    if (origin or form) and origin.partition("://")[2] != headers.get("host", "-"):
        raise Problem("cross_site", "a form has to come from a page of this gateway")


def headers_of(scope: Scope) -> dict[str, str]:
    """The request headers by lower-case name; of repeated headers the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _key_text(headers: Mapping[str, str]) -> str:
    authorization = headers.get("authorization", "")
    if authorization:
        scheme, _, text = authorization.partition(" ")
        if scheme.lower() != "bearer" or not text.strip():
            raise Problem("bad_key", "use Authorization: Bearer tn_...", headers=_CHALLENGE)
        return text.strip()
    return headers.get("x-api-key", "")


def _ticket(scope: Scope) -> str:
    query: bytes = scope.get("query_string", b"")
    if b"ticket=" not in query:
        return ""
    return parse_qs(query.decode("latin-1")).get("ticket", [""])[0]


@lru_cache(maxsize=1024)
def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed


def _group(text: str) -> _Group:
    """Parse a group such as `ops=admin`, or `acme=jobs:read+jobs:write@TENANT`."""
    name, sign, rest = text.rpartition("=")
    scopes, _, tenant = rest.partition("@")
    if not sign or not name.strip():
        raise UsageError(
            f"gateway.sso_groups: {text!r} is not of the form GROUP=SCOPE+SCOPE@TENANT; "
            "@TENANT may be left out"
        )
    chosen = check_scopes(scope.strip() for scope in scopes.split("+") if scope.strip())
    return _Group(name.strip(), frozenset(chosen), tenant.strip())


def _single_header(scope: Scope, name: str) -> str:
    """The value of a header that must be unique: a second one may come from the client itself."""
    key = name.encode("latin-1")
    texts = [v.decode(errors="replace").strip() for n, v in scope["headers"] if n == key]
    if len(texts) > 1 or any(not _is_printable(text) for text in texts):
        raise Problem("bad_key", f"the proxy has to send {name} once, as printable text")
    return texts[0] if texts else ""


def _is_printable(text: str) -> bool:
    return (
        len(text) <= _HEADER_CHARS_MAX
        and text.isprintable()
        and "\N{REPLACEMENT CHARACTER}" not in text
    )
