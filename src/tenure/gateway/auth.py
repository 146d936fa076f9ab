"""Who may come in: by key, by ticket, by a trusted proxy's word, or locally without any of them.

Without keys the gateway is open, but only to local programs: it must be bound to loopback, the
client must come from there without a proxy in between, and a browser must not have been sent by
another site's page (Host, Origin and Sec-Fetch-Site tell). As soon as a key exists, keys are asked
for. What the ring said is believed for a second, so a revoked key is out within two.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qs

from starlette.types import Scope

from tenure.core.endpoint import SCOPES, Caller
from tenure.gateway.joined_rings import JoinedRings
from tenure.gateway.keys import TOUCH_MS, Key, Keys, is_secret_of, split_key, worker_key
from tenure.gateway.limits import FailedLogins, Quota
from tenure.gateway.problems import Problem
from tenure.gateway.proxies import Proxies
from tenure.gateway.settings import GatewaySettings, is_local_host, is_loopback

T = TypeVar("T")

BELIEVE_S = 1.0
_CACHED_MAX = 10_000
_CHALLENGE = (("www-authenticate", 'Bearer realm="tenure"'),)
_PROXY_HEADERS = frozenset(
    (
        "via",
        "forwarded",
        "x-real-ip",
        "x-client-ip",
        "true-client-ip",
        "cf-connecting-ip",
        "cdn-loop",
    )
)

_USUAL = Quota()
ANONYMOUS = Caller("", frozenset(SCOPES))


class Door:
    """Admits callers. One per gateway process."""

    def __init__(self, ring: Keys, settings: GatewaySettings) -> None:
        self._ring = ring
        self._proxies = Proxies(settings)
        self._failed = FailedLogins(settings.failed_logins_per_min)
        own = not self._proxies.name_people  # else a request that no proxy named is a stranger's
        self._open = settings.anonymous and settings.on_loopback and own
        self._unix = bool(settings.unix_socket)
        self._own = worker_key(settings.worker_key) if settings.worker_key else None
        self._quota = settings.quota
        self._found: dict[str, tuple[float, Key | None]] = {}
        self._counted: dict[str, tuple[float, int]] = {}
        self._touched_ms: dict[str, int] = {}
        self._asking: dict[str, asyncio.Future[Any]] = {}

    async def admit(
        self, scope: Scope, headers: Mapping[str, str], *, queue_url: str = "", acts: bool = False
    ) -> Caller:
        """The caller of a request, perhaps for one queue only, or `Problem` 401 or 403.

        A ticket stands in a URL, which others may get to see: it never `acts`.
        """
        text = _key_text(headers)
        if text:
            return await self.by_key(text, scope, headers)
        ticket = _ticket(scope)
        if ticket:
            if acts:
                raise Problem("scope", "a ticket is good for reading alone; send the key itself")
            return await self._by_ticket(ticket, scope, headers)
        person = self._proxies.person(scope)
        if person is not None:
            check_own_page(scope["method"], headers, form=False)
            return person
        if not self._open or await self._count(queue_url):
            raise Problem("no_key", headers=_CHALLENGE)
        self._check_local(scope, headers)
        return ANONYMOUS

    async def live_key(self, key_id: str) -> Key | None:
        """A key by its id, if it may be used now."""
        key = await self._find(key_id)
        return key if key is not None and key.is_live(_now_ms()) else None

    def quota(self, requester: str) -> Quota:
        """How much a caller who was just admitted may ask for."""
        key = self._found.get(requester, (0.0, None))[1]
        return self._quota if key is None or key.quota == _USUAL else key.quota.over(self._quota)

    async def is_valid(self, caller: Caller) -> bool:
        """Whether a caller who was admitted earlier still would be."""
        if caller.person:
            return self._proxies.name_people
        if not caller.requester:
            return self._open and not await self._count()
        return await self.live_key(caller.requester) is not None

    async def by_key(
        self, text: str, scope: Scope, headers: Mapping[str, str], *, way: str = "api"
    ) -> Caller:
        """The caller who shows this key, or `Problem` 401, or 429 after too many wrong ones."""
        parts = split_key(text)
        key = await self._find(parts[0]) if parts else None
        now_ms = _now_ms()
        if not parts or not key or not is_secret_of(key, parts[1]) or not key.is_live(now_ms):
            raise self._refused(parts[0] if parts else "", scope, headers, way)
        if key is not self._own and now_ms - self._touched_ms.get(key.id, 0) > TOUCH_MS:
            self._touched_ms[key.id] = now_ms
            await self._ring.touch(key.id, now_ms)
        return Caller(key.id, frozenset(key.scopes))

    async def _by_ticket(self, ticket: str, scope: Scope, headers: Mapping[str, str]) -> Caller:
        caller = await self._ring.redeem(ticket)
        if caller is None or not await self.is_valid(caller):
            raise self._refused("", scope, headers, "ticket")
        return caller

    def address(self, scope: Scope, headers: Mapping[str, str]) -> str:
        """Where a request comes from."""
        return self._proxies.address(scope, headers)

    def _refused(self, key_id: str, scope: Scope, headers: Mapping[str, str], way: str) -> Problem:
        self._failed.note(self.address(scope, headers), key_id, way)
        return Problem("bad_key", headers=_CHALLENGE)

    async def _find(self, key_id: str) -> Key | None:
        if self._own is not None and key_id == self._own.id:
            return self._own
        now = time.monotonic()
        asked, key = self._found.get(key_id, (float("-inf"), None))
        if now - asked < BELIEVE_S:
            return key
        key = await self._asked(key_id, lambda: self._ring.find(key_id))
        if len(self._found) >= _CACHED_MAX:  # a flood of made-up ids must not grow it for ever
            self._found.clear()
        self._found[key_id] = (now, key)
        return key

    async def _count(self, queue_url: str = "") -> int:
        asked, count = self._counted.get(queue_url, (float("-inf"), 0))
        now = time.monotonic()
        if now - asked < BELIEVE_S:
            return count
        ring, what = self._ring, f"count {queue_url}"  # no id of a key
        if isinstance(ring, JoinedRings):
            count = await self._asked(what, lambda: ring.count(queue_url))
        else:
            count = await self._asked(what, ring.count)
        self._counted[queue_url] = (now, count)
        return count

    async def _asked(self, what: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The ring's answer; those who ask for the same while it is under way share it."""
        answer = self._asking.get(what)
        if answer is None:
            answer = self._asking[what] = asyncio.ensure_future(ask())
            answer.add_done_callback(lambda _: self._asking.pop(what, None))
        told: T = await asyncio.shield(answer)
        return told

    def _check_local(self, scope: Scope, headers: Mapping[str, str]) -> None:
        client = scope.get("client")
        if not self._unix and (client is None or not is_loopback(client[0])):
            raise Problem("no_key", headers=_CHALLENGE)
        # HTTP/1.0 is what nginx speaks to a server behind it, and by default all that tells of it.
        passed_on = scope["http_version"] == "1.0" or not _PROXY_HEADERS.isdisjoint(headers)
        if passed_on or "x-forwarded" in " ".join(headers):
            raise Problem(
                "no_key", "behind a proxy this gateway needs API keys", headers=_CHALLENGE
            )
        host = headers.get("host", "")
        is_local = self._unix or is_local_host(host)
        if len(headers) < len(scope["headers"]):  # some name came twice
            is_local = is_local and sum(name == b"host" for name, _ in scope["headers"]) < 2
        if not is_local:
            raise Problem("cross_site", "Host is not a name of this machine; use 127.0.0.1")
        origin = headers.get("origin", "")
        if origin and origin.partition("://")[2] != host:
            raise Problem("cross_site")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Problem("cross_site")


def check_own_page(method: str, headers: Mapping[str, str], *, form: bool = True) -> None:
    """Refuse what another site's page sent; a form must come from a page of ours.

    With `form` False it may come from a program too, which names no page at all.
    """
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
    if (origin or form) and origin.partition("://")[2] != headers.get("host", "-"):
        raise Problem("cross_site", "a form has to come from a page of this gateway")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


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
