"""What a trusted reverse proxy says: where a request really comes from, and which person sent it.

Its headers are read only where the connection itself comes from a configured address; from any
other peer they mean nothing. A person has the rights of the first configured group that he or she
belongs to; rights of several groups are never added up.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

import msgspec
from starlette.types import Scope

from tenure.core.endpoint import Caller
from tenure.core.errors import UsageError
from tenure.gateway.keys import checked_scopes
from tenure.gateway.problems import Problem
from tenure.gateway.settings import UNIX, GatewaySettings

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_HOPS_MAX = 32
_VALUE_CHARS_MAX = 4_096


class Group(msgspec.Struct, frozen=True):
    """What members of a group may do; jobs are theirs, or those of `tenant` if that is named."""

    name: str
    scopes: frozenset[str]
    tenant: str = ""


class Proxies:
    """The proxies that are trusted, and the groups of people whom they may announce."""

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
    def name_people(self) -> bool:
        """Whether people sign in at a proxy, so that no request is let in without an identity."""
        return bool(self._groups)

    def address(self, scope: Scope, headers: Mapping[str, str]) -> str:
        """Where a request comes from: the peer, or whom trusted proxies name as their client."""
        client = scope.get("client")
        peer: str = client[0] if client else UNIX
        if not self._trusts(peer):
            return peer
        hops = headers.get("x-forwarded-for", "").rsplit(",", _HOPS_MAX)[-_HOPS_MAX:]
        for hop in reversed(hops):
            text = hop.strip()
            if _address(text) is None:
                break
            peer = text
            if not self._trusts(text):
                break
        return peer

    def person(self, scope: Scope) -> Caller | None:
        """The person whom a trusted proxy names; None where there is none, or no such proxy."""
        client = scope.get("client")
        if not self._groups or not self._trusts(client[0] if client else UNIX):
            return None
        user = _only(scope, self._user)
        if not user:
            return None
        groups = {name.strip() for name in _only(scope, self._member_of).split(",")}
        for group in self._groups:
            if group.name in groups or group.name == "*":
                return Caller(group.tenant or f"sso:{user}", group.scopes, user)
        raise Problem("scope", "gateway.sso_groups names none of this person's groups")

    def _trusts(self, peer: str) -> bool:
        if peer == UNIX:
            return self._unix
        address = _address(peer)
        return address is not None and any(address in network for network in self._networks)


@lru_cache(maxsize=1024)
def _address(text: str) -> _Address | None:
    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed


def _group(text: str) -> Group:
    """A group in words such as `ops=admin`, or `acme=jobs:read+jobs:write@TENANT`."""
    name, sign, rest = text.rpartition("=")
    scopes, _, tenant = rest.partition("@")
    if not sign or not name.strip():
        raise UsageError(
            f"gateway.sso_groups: {text!r} is not of the form GROUP=SCOPE+SCOPE@TENANT; "
            "@TENANT may be left out"
        )
    chosen = checked_scopes(scope.strip() for scope in scopes.split("+") if scope.strip())
    return Group(name.strip(), frozenset(chosen), tenant.strip())


def _only(scope: Scope, name: str) -> str:
    """The one value of a header. A second one may be the client's own, so both are refused."""
    wanted = name.encode("latin-1")
    texts = [v.decode(errors="replace").strip() for n, v in scope["headers"] if n == wanted]
    if len(texts) > 1 or any(not _is_name(text) for text in texts):
        raise Problem("bad_key", f"the proxy has to send {name} once, as printable text")
    return texts[0] if texts else ""


def _is_name(text: str) -> bool:
    return (
        len(text) <= _VALUE_CHARS_MAX
        and text.isprintable()
        and "\N{REPLACEMENT CHARACTER}" not in text
    )


__all__ = ["Group", "Proxies"]
