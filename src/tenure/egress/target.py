"""A URL, read once and strictly; the request is made from what was read, never from the text.

Spellings that programs read in different ways are refused and not repaired: user names, spaces and
backslashes, hosts outside ASCII, and numbers as hosts other than a plain dotted quad.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from tenure.egress.errors import Refused

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
        """All that may be shown of it."""
        return f"{self.scheme}://{self.authority}"

    @property
    def authority(self) -> str:
        """The Host header: the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


@lru_cache(maxsize=1_024)
def read_target(url: str) -> Target:
    """Take a URL apart, or say why this one is not acceptable; touches no network.

    What it reads depends on the text alone, so a URL that comes again is not read again. Where its
    host leads to is no part of that: whoever connects asks the guard.
    """
    if not 0 < len(url) <= URL_CHARS_MAX:
        raise Refused(f"a URL has 1 to {URL_CHARS_MAX} characters")
    if not _PLAIN.fullmatch(url) or _STRANGE.search(url):
        raise Refused("a URL is plain ASCII without spaces or backslashes (encode the rest)")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise Refused("the URL's host or port cannot be read") from None
    if parts.scheme not in _PORTS:
        raise Refused(f"a URL begins with https://, not {parts.scheme[:20]!r}")
    if "@" in parts.netloc:
        raise Refused("a URL must not carry a user name or password")
    if not parts.hostname or port == 0 or parts.netloc.endswith(":"):
        raise Refused("the URL names no host, or an impossible port")
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
        raise Refused(f"{text[:80]!r} is not a host name")
    return text.removesuffix(".")


def _ipv4(text: str) -> str:
    """127.1, 0x7f000001 and 2130706433 all mean 127.0.0.1 to somebody: one spelling is enough."""
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise Refused(
            f"{text[:80]!r}: write an IPv4 address as four decimal numbers, as in 192.0.2.7"
        ) from None


def _ipv6(text: str) -> str:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        raise Refused(f"[{text[:80]}] is not an IPv6 address") from None
    if address.scope_id is not None:
        raise Refused("an IPv6 address with a zone means a link of this machine")
    return str(address)
