"""What the gateway can be told, in one frozen value; the command line fills it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from leasehold.core.errors import UsageError

KIB = 1024
BODY_BYTES_MAX = 200 * KIB
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
    """`queues` are the URLs served; their stores also hold the keys, the first one's the audit log.

    `rate_per_s` 0 means no limit by rate. `streams_per_key` bounds open event streams of one key.
    `anonymous` False asks for a key even on loopback. `worker_key` is the text of a key for workers
    that is good besides those of the store: whoever starts gateway and workers together shares it.
    `admin_address` (host:port) answers what administrators and observers ask for, which is then not
    found at the other address. `trusted_proxies` are addresses and networks of proxies: they may
    have more connections than `connections_per_address`.
    `redact` names payload keys whose values the
    pages mask, besides the usual ones; `trace_url` is where a trace is shown, with `{trace_id}`;
    `lake` is the folder in which the pipeline keeps the history. `lent` is what endpoints of some
    contracts need and only the command line can make, by name: `seal` encrypts credentials,
    `check_url` refuses addresses that no worker may call.
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
    form_bytes_max: int = 1024 * KIB
    head_bytes_max: int = 32 * KIB
    head_timeout_ms: int = 10_000
    idle_timeout_s: int = 20
    connections_max: int = 4_000
    connections_per_address: int = 1_000
    trusted_proxies: tuple[str, ...] = ()
    heartbeat_ms: int = 15_000
    sweep_ms: int = 1_000
    retry_ms: int = 2_000
    client_bytes_max: int = 256 * KIB
    streams_per_key: int = 20
    rate_per_s: float = 0.0
    rate_burst: int = 0
    drain_ms: int = 10_000
    redact: tuple[str, ...] = ()
    trace_url: str = ""
    lake: str = ""
    lent: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        least = dict.fromkeys(_POSITIVE, 1) | {"rate_per_s": 0, "rate_burst": 0, "drain_ms": 0}
        for name, limit in (least | {"head_bytes_max": 8192}).items():
            if getattr(self, name) < limit:
                raise UsageError(f"gateway: {name} is at least {limit}, not {getattr(self, name)}")
        for each in self.trusted_proxies:
            try:
                ipaddress.ip_network(each)
            except ValueError as error:
                raise UsageError(f"gateway: trusted_proxies: {error}") from None
        if self.admin_address and split_address(self.admin_address)[1] == self.port != 0:
            raise UsageError("gateway: the admin address needs a port of its own")

    def body_limit(self, own: int) -> int:
        """The largest body of an endpoint that names `own`; a limit that was lowered is for all."""
        lowered = self.body_bytes_max < BODY_BYTES_MAX
        return self.body_bytes_max if lowered else max(self.body_bytes_max, own)

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the gateway."""
        admin = split_address(self.admin_address)[0] if self.admin_address else "localhost"
        return is_loopback(admin) and (bool(self.unix_socket) or is_loopback(self.host))


def split_address(text: str) -> tuple[str, int]:
    """Host and port of an address to listen on.

    >>> [split_address(text) for text in ("127.0.0.1:8081", "[::1]:8081")]
    [('127.0.0.1', 8081), ('::1', 8081)]
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text!r} is no address to listen on; one looks like 127.0.0.1:8081")
    return host.removeprefix("[").removesuffix("]"), int(port)


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own; a name other than localhost is not trusted.

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
