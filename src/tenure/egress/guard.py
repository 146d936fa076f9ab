"""The guard against SSRF: strict parsing of URLs, and a check of every address."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from tenure.core.errors import TenureError, UsageError

if TYPE_CHECKING:
    import aiodns


class EgressError(TenureError):
    """Root of the errors of outbound requests."""

    code = "egress"


class RequestRefused(EgressError):
    """This worker may not connect to the URL or to an address of its host."""

    code = "address_refused"


class Unreachable(EgressError):
    """No connection, or no response within the deadline."""

    code = "unreachable"


class RequestTimedOut(Unreachable):
    """The exchange was not complete at its deadline; the request may have had an effect."""


class Disconnected(EgressError):
    """The connection ended before the response did.

    `stale` is true for a reused connection that ended before the first byte of this response. Most
    likely the peer had closed it while it was idle, and a new connection will work.
    """

    code = "disconnected"

    def __init__(self, message: str, *, stale: bool = False) -> None:
        super().__init__(message)
        self.stale = stale


class TooLarge(EgressError):
    """More bytes than the limit."""

    code = "too_large"


URL_CHARS_MAX = 4_096
_PORTS = {"http": 80, "https": 443}
_PLAIN = re.compile(r"[!-~]+")  # ASCII without spaces and control characters
_STRANGE = re.compile(r"[\\^`{|}<>\"]")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes. `host` is a lower-case name or a canonical address."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def origin(self) -> str:
        """Scheme, host and port: what messages may show of a URL."""
        return f"{self.scheme}://{self.authority}"

    @property
    def authority(self) -> str:
        """The Host header; without the default port of the scheme."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


@lru_cache(maxsize=1_024)
def read_target(url: str) -> Target:
    """Parse a URL; raises `RequestRefused` with the reason. Uses no network.

    The result depends only on the text, so it is cached. The addresses of the host are not part of
    it: they are looked up and checked for every connection.
    """
    if not 0 < len(url) <= URL_CHARS_MAX:
        raise RequestRefused(f"a URL has 1 to {URL_CHARS_MAX} characters")
    if not _PLAIN.fullmatch(url) or _STRANGE.search(url):
        raise RequestRefused("a URL is plain ASCII without spaces or backslashes (encode the rest)")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise RequestRefused("the URL's host or port cannot be read") from None
    if parts.scheme not in _PORTS:
        raise RequestRefused(
            f"a URL must begin with http:// or https://, not {parts.scheme[:20]!r}"
        )
    if "@" in parts.netloc:
        raise RequestRefused("a URL must not carry a user name or password")
    if not parts.hostname or port == 0 or parts.netloc.endswith(":"):
        raise RequestRefused("the URL names no host, or an impossible port")
    host = _host(parts.hostname, bracketed=parts.netloc.startswith("["))
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, port or _PORTS[parts.scheme], path)


def _host(text: str, *, bracketed: bool) -> str:
    text = text.lower()
    if bracketed:
        return _ipv6(text)
    labels = text.removesuffix(".").split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return _ipv4(text)
    if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise RequestRefused(f"{text[:80]!r} is not a host name")
    return text.removesuffix(".")


def _ipv4(text: str) -> str:
    """Accepts only four decimal numbers: some programs read 127.1 and 0x7f000001 as 127.0.0.1."""
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise RequestRefused(
            f"{text[:80]!r}: write an IPv4 address as four decimal numbers, as in 192.0.2.7"
        ) from None


def _ipv6(text: str) -> str:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        raise RequestRefused(f"[{text[:80]}] is not an IPv6 address") from None
    if address.scope_id is not None:
        raise RequestRefused("an IPv6 address with a zone means a link of this machine")
    return str(address)


Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_NON_PUBLIC_V4 = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local, cloud metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
_OPEN_V6 = ipaddress.IPv6Network("2000::/3")
_NON_PUBLIC_V6 = tuple(
    ipaddress.IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments: Teredo, ORCHID and others
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: leads to the IPv4 address inside
        "3fff::/20",  # documentation
    )
)


def _unwrapped(address: Address) -> Address:
    """The IPv4 address in an IPv4-mapped IPv6 address; other addresses unchanged.

    >>> _unwrapped(ipaddress.ip_address("::ffff:127.0.0.1"))
    IPv4Address('127.0.0.1')
    """
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def is_public(address: Address) -> bool:
    """Whether this is an address of the public internet.

    >>> is_public(ipaddress.ip_address("1.1.1.1")), is_public(ipaddress.ip_address("64:ff9b::1"))
    (True, False)
    """
    address = _unwrapped(address)
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NON_PUBLIC_V4)
    if address.scope_id is not None or address not in _OPEN_V6:
        return False
    return not any(address in network for network in _NON_PUBLIC_V6)


Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves host and port to addresses."""

_RESOLVE_TIMEOUT_S = 5.0
_HOST_RULE = re.compile(
    r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<host>[^:/\[\]\s]+))(?::(?P<port>\d{1,5}))?"
)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator permits. The default is the public internet, over https only."""

    ports: tuple[int, ...] = (443, 8443)
    allow: tuple[str, ...] = ()
    _rules: tuple[_Rule, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rules", tuple(_read_rule(text) for text in self.allow))

    def allows_name(self, target: Target) -> bool:
        """Whether the allow list names this host and port."""
        return any(rule.names(target) for rule in self._rules)

    def allows_address(self, address: Address, port: int) -> bool:
        """Whether the allow list has a network with this address."""
        return any(rule.holds(address, port) for rule in self._rules)


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str = ""
    network: Network | None = None
    port: int | None = None

    def names(self, target: Target) -> bool:
        if not self.name or self.port not in (None, target.port):
            return False
        if self.name.startswith("*."):
            return target.host.endswith(self.name[1:])
        return target.host == self.name

    def holds(self, address: Address, port: int) -> bool:
        return self.network is not None and self.port in (None, port) and address in self.network


class Guard:
    """Returns the addresses of a URL that a client may connect to, or raises `RequestRefused`."""

    def __init__(self, policy: Policy | None = None, *, resolve: Resolve | None = None) -> None:
        self._policy = policy or Policy()
        self._resolve = resolve or SystemResolver()

    def check_url(self, url: str) -> Target:
        """Check without a DNS lookup, for the moment at which a job is submitted."""
        target = read_target(url)
        literal = _literal(target.host)
        if literal is not None:
            self._check_addresses(target, [literal])
        elif not self._policy.allows_name(target) and not self._policy.allow:
            self._check_form(target)
        return target

    async def addresses(self, target: Target) -> list[str]:
        """Resolve and check. The caller connects to these addresses without another lookup."""
        literal = _literal(target.host)
        found = [literal] if literal is not None else await self._look_up(target)
        self._check_addresses(target, found)
        return [str(address) for address in found]

    async def close(self) -> None:
        """Cancel the lookups of this event loop."""
        if isinstance(self._resolve, SystemResolver):
            await self._resolve.close()

    async def _look_up(self, target: Target) -> list[Address]:
        """The addresses of a name; [] if it has none or is not resolved in time."""
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                texts = await self._resolve(target.host, target.port)
        except (TimeoutError, OSError):
            return []
        # An address with a scope (`fe80::1%eth0`) is link-local, and is_public refuses it.
        return list(dict.fromkeys(_unwrapped(ipaddress.ip_address(text)) for text in texts))

    def _check_addresses(self, target: Target, found: Sequence[Address]) -> None:
        """Raise if one address is not permitted: one bad address among good ones is an attack.

        A name without an address and a name with an internal address give the same error. The
        difference would show requesters which internal names exist.
        """
        named = self._policy.allows_name(target)
        if found and (
            named or all(self._policy.allows_address(address, target.port) for address in found)
        ):
            return
        if not named:
            self._check_form(target)
        if _literal(target.host) is not None:
            if not is_public(found[0]):
                raise RequestRefused(f"{target.origin} is not a public address")
        elif not found or not all(map(is_public, found)):
            raise Unreachable(f"{target.origin}: its name leads to no public address")

    def _check_form(self, target: Target) -> None:
        if target.host == "localhost" or target.host.endswith(".localhost"):
            raise RequestRefused(f"{target.origin} is not a public address")
        if target.scheme != "https":
            raise RequestRefused(f"{target.origin}: only https is permitted here")
        if target.port not in self._policy.ports:
            permitted = ", ".join(map(str, self._policy.ports))
            raise RequestRefused(f"{target.origin}: the permitted ports are {permitted}")


class Unguarded(Guard):
    """Permits every target: for addresses chosen by the operator, not by a requester."""

    async def addresses(self, target: Target) -> list[str]:
        """The host itself; it is resolved while connecting."""
        return [target.host]


class SystemResolver:
    """Resolves names by the machine's hosts file and resolv.conf, without threads.

    `getaddrinfo` of uvloop has two threads. A few names whose servers do not answer would delay
    every other lookup of the worker.
    """

    def __init__(self, nameservers: Sequence[str] | None = None) -> None:
        self._nameservers = nameservers
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, aiodns.DNSResolver] = (
            WeakKeyDictionary()
        )

    async def __call__(self, host: str, port: int) -> list[str]:
        """The addresses of a host."""
        import aiodns  # part of the extra `inbox`; a worker of a plane does not need it

        loop = asyncio.get_running_loop()
        resolver = self._by_loop.get(loop)
        if resolver is None:
            resolver = aiodns.DNSResolver(
                self._nameservers, loop, timeout=_RESOLVE_TIMEOUT_S / 2, tries=5
            )
            self._by_loop[loop] = resolver
        try:
            found = await resolver.getaddrinfo(host, port=port, type=socket.SOCK_STREAM)
        except aiodns.error.DNSError as error:
            raise OSError(f"{host}: {error}") from None
        return [node.addr[0].decode() for node in found.nodes]

    async def close(self) -> None:
        """Cancel the lookups of this event loop; a later call starts a new resolver."""
        resolver = self._by_loop.pop(asyncio.get_running_loop(), None)
        if resolver is not None:
            await resolver.close()


def _literal(host: str) -> Address | None:
    try:
        return _unwrapped(ipaddress.ip_address(host))
    except ValueError:
        return None


def _read_rule(text: str) -> _Rule:
    match = _HOST_RULE.fullmatch(text.strip().lower())
    host = (match["six"] or match["host"]) if match else text.strip()
    port = int(match["port"]) if match and match["port"] else None
    try:
        return _Rule(network=ipaddress.ip_network(host), port=port)
    except ValueError:
        pass
    if match is None or match["six"] or "*" in host[1:] or (port or 1) > 65_535:
        raise UsageError(
            f"allow list: {text!r} is not a network (10.0.0.0/8), host (hooks.internal:8080) "
            "or pattern of hosts (*.svc.internal)"
        )
    return _Rule(name=host, port=port)
