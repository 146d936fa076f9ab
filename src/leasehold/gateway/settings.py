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


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`queues` are the URLs served; their stores also hold the keys, the first one's the audit log.

    `rate_per_s` 0 means no limit by rate. `streams_per_key` bounds open event streams of one key.
    `anonymous` False asks for a key even on loopback. `worker_key` is the text of a key for workers
    that is good besides those of the store: whoever starts gateway and workers together shares it.
    A session of a browser ends `session_ms` after it began and `session_idle_ms` after its last
    use. So many failed logins a minute are answered by address and by key, 0: all of them. Peers of
    `trusted_proxies` (addresses, networks, "unix") may name the person who sent a request and the
    person's groups in two headers; `sso_groups` says what members of a group may do.
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
    anonymous: bool = True
    worker_key: str = ""
    ttl_s: int = 86_400
    body_bytes_max: int = BODY_BYTES_MAX
    body_timeout_ms: int = 30_000
    heartbeat_ms: int = 15_000
    sweep_ms: int = 1_000
    retry_ms: int = 2_000
    client_bytes_max: int = 256 * KIB
    streams_per_key: int = 20
    rate_per_s: float = 0.0
    rate_burst: int = 0
    drain_ms: int = 10_000
    session_ms: int = 12 * 3_600_000
    session_idle_ms: int = 2 * 3_600_000
    failed_logins_per_min: int = 30
    trusted_proxies: tuple[str, ...] = ()
    sso_groups: tuple[str, ...] = ()
    sso_user_header: str = "X-Forwarded-User"
    sso_groups_header: str = "X-Forwarded-Groups"
    redact: tuple[str, ...] = ()
    trace_url: str = ""
    lake: str = ""
    lent: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        least = {"streams_per_key": 1, "heartbeat_ms": 1, "body_bytes_max": 1, "body_timeout_ms": 1}
        least |= {"rate_per_s": 0, "rate_burst": 0, "drain_ms": 0, "failed_logins_per_min": 0}
        least |= {"session_ms": 1, "session_idle_ms": 1}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise UsageError(f"gateway: {name} is at least {limit}, not {getattr(self, name)}")

    def body_limit(self, own: int) -> int:
        """The largest body of an endpoint that names `own`; a limit that was lowered is for all."""
        lowered = self.body_bytes_max < BODY_BYTES_MAX
        return self.body_bytes_max if lowered else max(self.body_bytes_max, own)

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the gateway."""
        return bool(self.unix_socket) or is_loopback(self.host)


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
