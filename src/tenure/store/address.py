"""Where a Redis server is and who we are there, read from a URL.

    redis://[user[:password]@]host[:port][/db]
    rediss://...?cafile=ca.pem&certfile=client.pem&keyfile=client.key      (TLS)
    redis+unix:///path/to/socket?db=0        unix:///path/to/socket

The password leaves this module only inside the AUTH command: `label` is what errors and logs show.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from tenure.core.errors import UsageError

DEFAULT_PORT = 6379
_TCP = {"redis": False, "rediss": True}
_UNIX = {"unix", "redis+unix"}
_TLS_OPTIONS = {"cafile", "certfile", "keyfile"}
_FORMS = (
    "redis://host:6379/0, rediss://host:6379/0?cafile=ca.pem or redis+unix:///path/to/socket?db=0"
)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed Redis URL; `path` is set for a unix socket, `host` and `port` otherwise."""

    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""
    db: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    cafile: str = ""
    certfile: str = ""
    keyfile: str = ""

    @property
    def label(self) -> str:
        """The address without credentials, for messages."""
        if self.path:
            return f"redis+unix://{self.path}?db={self.db}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.db}"

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS settings of this address, None without TLS."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.cafile or None)
            if self.certfile:
                context.load_cert_chain(self.certfile, self.keyfile or None)
        except OSError as error:
            raise UsageError(
                f"{self.label}: the TLS files of this URL cannot be used: {error}"
            ) from error
        return context


def parse_address(url: str) -> RedisAddress:
    """Reads a Redis URL; whatever is wrong raises UsageError without repeating the password."""
    try:
        parts = urlsplit(url)
        options = dict(
            parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        )
        port = parts.port
    except ValueError:
        # The parser's own words may quote the password, so they are not passed on.
        raise UsageError(f"this Redis URL cannot be read; expected {_FORMS}") from None
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme in _UNIX:
        _check_options(options, {"db"})
        if not parts.path.strip("/"):
            raise UsageError(f"a {parts.scheme}:// URL needs the socket's path; expected {_FORMS}")
        db = _database(options.get("db", ""))
        return RedisAddress(path=unquote(parts.path), db=db, user=user, password=password)
    if parts.scheme not in _TCP:
        raise UsageError(f"{parts.scheme or 'an empty scheme'}: not a Redis URL; expected {_FORMS}")
    return _tcp_address(parts, options, port, user, password)


def _tcp_address(
    parts: SplitResult, options: dict[str, str], port: int | None, user: str, password: str
) -> RedisAddress:
    tls = _TCP[parts.scheme]
    _check_options(options, {"db"} | (_TLS_OPTIONS if tls else set()))
    in_path = parts.path.strip("/")
    if in_path and "db" in options:
        raise UsageError("a Redis URL names its database once: either /0 or ?db=0")
    if "keyfile" in options and "certfile" not in options:
        raise UsageError("a Redis URL with keyfile needs certfile as well")
    return RedisAddress(
        host=parts.hostname or "localhost",
        port=DEFAULT_PORT if port is None else port,
        db=_database(in_path or options.get("db", "")),
        user=user,
        password=password,
        tls=tls,
        cafile=options.get("cafile", ""),
        certfile=options.get("certfile", ""),
        keyfile=options.get("keyfile", ""),
    )


def _check_options(options: dict[str, str], known: set[str]) -> None:
    unknown = sorted(options.keys() - known)
    if unknown:
        names = ", ".join(sorted(known))
        raise UsageError(f"unknown option {unknown[0]!r} in the Redis URL; known here: {names}")


def _database(text: str) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UsageError(
            f"{text[:20]!r} is not a Redis database number; expected a number such as 0"
        )
    return int(text)
