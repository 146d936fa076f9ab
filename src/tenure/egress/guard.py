"""The guard: which targets may be spoken to, and at which addresses.

A target passes when it is https on a permitted port and every address of its host is public. An
allow list, for private deployments, takes networks (`10.20.0.0/16`), hosts (`hooks.internal`),
hosts with a port (`127.0.0.1:9000`) and families of names (`*.svc.internal`); what it names may be
private, speak plain http, and listen on any port (or on that one port).
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import aiodns

from tenure.core.errors import UsageError
from tenure.egress.errors import Refused, Unreachable
from tenure.egress.ranges import Address, Network, is_public, unwrapped
from tenure.egress.target import Target, read_target

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to addresses, as text."""

_RESOLVE_TIMEOUT_S = 5.0
_HOST_RULE = re.compile(
    r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<host>[^:/\[\]\s]+))(?::(?P<port>\d{1,5}))?"
)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator permits. The default is the open internet, by https alone."""

    ports: tuple[int, ...] = (443, 8443)
    allow: tuple[str, ...] = ()
    _rules: tuple[_Rule, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rules", tuple(_read_rule(text) for text in self.allow))

    def allows_name(self, target: Target) -> bool:
        """Whether the list names this host (and port)."""
        return any(rule.names(target) for rule in self._rules)

    def allows_address(self, address: Address, port: int) -> bool:
        """Whether the list holds a network with this address."""
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
    """Answers for a URL with the addresses that may be connected to, or with `Refused`."""

    def __init__(self, policy: Policy | None = None, *, resolve: Resolve | None = None) -> None:
        self._policy = policy or Policy()
        self._resolve = resolve or SystemResolver()

    def check_url(self, url: str) -> Target:
        """What can be told without asking the name server: for the moment a job is submitted."""
        target = read_target(url)
        literal = _literal(target.host)
        if literal is not None:
            self._judge(target, [literal])
        elif not self._policy.allows_name(target) and not self._policy.allow:
            self._check_form(target)
        return target

    async def addresses(self, target: Target) -> list[str]:
        """Resolve once. The caller connects to these and asks nobody again."""
        literal = _literal(target.host)
        found = [literal] if literal is not None else await self._look_up(target)
        self._judge(target, found)
        return [str(address) for address in found]

    async def close(self) -> None:
        """End the lookups of this event loop."""
        if isinstance(self._resolve, SystemResolver):
            await self._resolve.close()

    async def _look_up(self, target: Target) -> list[Address]:
        """The addresses of a name; none where it has none or is not resolved in time."""
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                texts = await self._resolve(target.host, target.port)
        except (TimeoutError, OSError):
            return []
        # A scope (`fe80::1%eth0`) makes the address a link-local one, which is_public refuses.
        return list(dict.fromkeys(unwrapped(ipaddress.ip_address(text)) for text in texts))

    def _judge(self, target: Target, found: Sequence[Address]) -> None:
        """Raise where one of the addresses is not permitted: among good ones it is an attack.

        A name without an address and one with an internal address are the same error: requesters
        would learn from the difference which internal names there are.
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
                raise Refused(f"{target.origin} is not a public address")
        elif not found or not all(map(is_public, found)):
            raise Unreachable(f"{target.origin}: its name leads to no public address")

    def _check_form(self, target: Target) -> None:
        if target.host == "localhost" or target.host.endswith(".localhost"):
            raise Refused(f"{target.origin} is not a public address")
        if target.scheme != "https":
            raise Refused(f"{target.origin}: only https is permitted here")
        if target.port not in self._policy.ports:
            permitted = ", ".join(map(str, self._policy.ports))
            raise Refused(f"{target.origin}: the permitted ports are {permitted}")


class SystemResolver:
    """Looks names up as the machine's files say (hosts, resolv.conf), without a thread for each.

    `getaddrinfo` of the event loop has two threads in uvloop: a few names whose servers are silent
    would hold up every other lookup of the worker.
    """

    def __init__(self, nameservers: Sequence[str] | None = None) -> None:
        self._nameservers = nameservers
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, aiodns.DNSResolver] = (
            WeakKeyDictionary()
        )

    async def __call__(self, host: str, port: int) -> list[str]:
        """The addresses of a host."""
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
        """Give up what this event loop still asks; another call begins anew."""
        resolver = self._by_loop.pop(asyncio.get_running_loop(), None)
        if resolver is not None:
            await resolver.close()


def _literal(host: str) -> Address | None:
    try:
        return unwrapped(ipaddress.ip_address(host))
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
            f"allow list: {text!r} is no network (10.0.0.0/8), host (hooks.internal:8080) "
            "or family of hosts (*.svc.internal)"
        )
    return _Rule(name=host, port=port)
