"""The settings of a gateway as one frozen value, made by the command line."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from tenure.core.errors import UsageError
from tenure.gateway.limits import Quota

_KIB = 1024
UNIX = "unix"
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([0-9a-z.-]+))(?::[0-9]{1,5})?")
BODY_BYTES_MAX = 200 * _KIB
_POSITIVE = (
    "streams_per_key",
    "heartbeat_ms",
    "body_bytes_max",
    "body_timeout_ms",
    "form_bytes_max",
    "head_timeout_ms",
    "idle_timeout_s",
    "connections_max",
    "connections_per_address",
)


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one gateway.

    `queues` are the URLs of the queues. Their stores also hold the API keys, and the store of the
    first queue the audit log. `rate_per_s` 0 means no rate limit. `streams_per_key` bounds the open
    event streams of a key, `depth_per_key` its unfinished jobs in one queue (0: no limit). A key
    may have its own limits.
    `anonymous` False requires a key even on loopback. `worker_key` is the text of a key for workers
    that is valid besides those of the store, for a gateway that is started together with workers.
    `admin_address` (host:port) serves the routes of administrators and observers, which then do
    not exist at the other address. Peers of `trusted_proxies` (addresses, networks, "unix") may
    have more connections than `connections_per_address`, and may name the person who sent a request
    and the person's groups in two headers; `sso_groups` says what members of a group may do.
    A session of a browser ends `session_ms` after it began and `session_idle_ms` after its last
    use. `failed_logins_per_min` is per address and per key (0: no limit).
    `redact` adds names and patterns of values to mask. `audit_keep` is the number of entries that
    the audit log keeps. `trace_url` is the address of a trace, with `{trace_id}`. `lake` is the
    folder of the pipeline's history. `route_options` are passed to the routes of contracts: `seal`
    encrypts credentials, `check_url` refuses addresses that no worker may call.
    """

    queues: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8470
    unix_socket: str = ""
    admin_address: str = ""
    anonymous: bool = True
    worker_key: str = ""
    ttl_s: int = 86_400
    body_bytes_max: int = BODY_BYTES_MAX
    body_timeout_ms: int = 30_000
    form_bytes_max: int = 1024 * _KIB
    head_bytes_max: int = 32 * _KIB
    head_timeout_ms: int = 10_000
    idle_timeout_s: int = 20
    connections_max: int = 4_000
    connections_per_address: int = 1_000
    heartbeat_ms: int = 15_000
    sweep_ms: int = 1_000
    retry_ms: int = 2_000
    client_bytes_max: int = 256 * _KIB
    streams_per_key: int = 20
    depth_per_key: int = 100_000
    rate_per_s: float = 1_000.0
    rate_burst: int = 2_000
    drain_ms: int = 10_000
    session_ms: int = 12 * 3_600_000
    session_idle_ms: int = 2 * 3_600_000
    failed_logins_per_min: int = 30
    trusted_proxies: tuple[str, ...] = ()
    sso_groups: tuple[str, ...] = ()
    sso_user_header: str = "X-Forwarded-User"
    sso_groups_header: str = "X-Forwarded-Groups"
    redact: tuple[str, ...] = ()
    audit_keep: int = 10_000
    trace_url: str = ""
    lake: str = ""
    route_options: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        if self.trace_url and not self.trace_url.lower().startswith(("http://", "https://")):
            raise UsageError("gateway: trace_url is an http or https URL with {trace_id}")
        least = dict.fromkeys(_POSITIVE, 1) | {"head_bytes_max": 8192, "audit_keep": 100}
        least |= dict.fromkeys(("rate_per_s", "rate_burst", "depth_per_key", "drain_ms"), 0)
        least |= {"failed_logins_per_min": 0, "session_ms": 1, "session_idle_ms": 1}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise UsageError(f"gateway: {name} is at least {limit}, not {getattr(self, name)}")
        _ = self.proxy_networks
        if self.admin_address and split_address(self.admin_address)[1] == self.port != 0:
            raise UsageError("gateway: the admin address needs a port of its own")

    def body_limit(self, own: int, quota: Quota) -> int:
        """The largest body of an endpoint with the limit `own`; a lowered limit applies to all."""
        most = quota.body_bytes or self.body_bytes_max
        return most if most < BODY_BYTES_MAX else max(most, own)

    @property
    def proxy_networks(self) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
        """The networks among `trusted_proxies`."""
        try:
            return [ipaddress.ip_network(each) for each in self.trusted_proxies if each != UNIX]
        except ValueError as error:
            raise UsageError(
                f"gateway.trusted_proxies: {error}; right are 10.0.0.7, 10.0.0.0/8 and unix"
            ) from None

    @property
    def quota(self) -> Quota:
        """The default quota of a key."""
        return Quota(
            rate_per_s=self.rate_per_s,
            rate_burst=self.rate_burst,
            depth=self.depth_per_key,
            body_bytes=self.body_bytes_max,
            streams=self.streams_per_key,
        )

    @property
    def on_loopback(self) -> bool:
        """Whether only programs on this machine can reach the gateway."""
        admin = split_address(self.admin_address)[0] if self.admin_address else "localhost"
        return is_loopback(admin) and (bool(self.unix_socket) or is_loopback(self.host))


def split_address(text: str) -> tuple[str, int]:
    """Host and port of an address to listen on.

    >>> [split_address(text) for text in ("127.0.0.1:8081", "[::1]:8081")]
    [('127.0.0.1', 8081), ('::1', 8081)]
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            f"{text!r} is not an address to listen on; an address looks like 127.0.0.1:8081"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address; of names only localhost counts.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


@lru_cache(maxsize=1024)
def is_local_host(header: str) -> bool:
    """Whether a Host header, with or without a port, names this machine.

    >>> [is_local_host(text) for text in ("127.0.0.1:8470", "[::1]:8470", "localhost")]
    [True, True, True]
    >>> [is_local_host(text) for text in ("[::1].evil.com", "localhost:80@evil", "::1", "")]
    [False, False, False, False]
    """
    named = _HOST.fullmatch(header)
    return named is not None and is_loopback(named[1] or named[2])
