"""PostgreSQL URLs: the options of libpq, and ours for logins, poolers and limits of time.

postgresql://user[:password]@host[:port][,host[:port]...]/database?option=value&...

Ours are `PostgresOptions` and those of `store.credentials`. All others go to the driver, as libpq
reads them; what is no option of a connection is a setting of the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec

from tenure.core.errors import UsageError
from tenure.store.credentials import LOGIN_OPTIONS, check_login, current_login

Pooling = Literal["auto", "session", "transaction"]

_PORT = 5432
_CONNECT_TIMEOUT_S = 5.0
_DAY_S = 86_400
# Options of libpq that asyncpg does not have. It would send them as settings of the server.
_LIBPQ_ONLY = """
    channel_binding client_encoding fallback_application_name gssdelegation gssencmode hostaddr
    keepalives keepalives_count keepalives_idle keepalives_interval load_balance_hosts replication
    require_auth requirepeer sslcertmode sslcompression sslcrldir sslsni tcp_user_timeout
"""
_BOTH = """
    application_name connect_timeout dbname gsslib host krbsrvname options passfile password port
    service sslcert sslcrl sslkey sslmode sslnegotiation sslpassword sslrootcert
    ssl_max_protocol_version ssl_min_protocol_version target_session_attrs user
"""
_OF_LIBPQ_ONLY = frozenset(_LIBPQ_ONLY.split())
_OF_BOTH = frozenset(_BOTH.split())


class PostgresOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Our options of a PostgreSQL URL.

    `pooling` says who shares the server's sessions: `session` is a server, or a pooler that gives
    each connection a session of its own; `transaction` a pooler that gives a session for one
    transaction; `auto` finds out. `notify_address` is `host:port` of the server behind a pooler,
    for notices alone. A connection that is idle for `idle_s` is closed. The server ends a statement
    after `statement_timeout_ms` (0: as the server is set).
    """

    pooling: Pooling = "auto"
    notify_address: str = ""
    idle_s: float = 30.0
    statement_timeout_ms: int = 0


STORE_OPTIONS = LOGIN_OPTIONS | frozenset(PostgresOptions.__struct_fields__)
"""The options of a PostgreSQL URL that the driver does not know."""


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """A parsed URL: how to connect, and our options.

    `label` is the address without login and options, for errors and logs.
    """

    dsn: str = field(repr=False)
    label: str
    user: str
    options: PostgresOptions
    settings: Mapping[str, str]
    connect_timeout_s: float = _CONNECT_TIMEOUT_S
    hosts: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    login: Mapping[str, str] = field(default_factory=dict, repr=False)

    def current_login(self) -> tuple[str, str] | None:
        """The user and the password of now, None if the URL itself says them; may block."""
        if not self.login:
            return None
        names = {name.removeprefix("password_"): value for name, value in self.login.items()}
        names["provider"] = names.pop("credentials", "")
        return current_login(self.label, self.user, **names)

    def arguments(self, login: tuple[str, str] | None) -> dict[str, Any]:
        """The arguments of `asyncpg.connect`."""
        made: dict[str, Any] = {
            "dsn": self.dsn,
            "timeout": self.connect_timeout_s,
            "server_settings": dict(self.settings),
        }
        if self.hosts:
            made["host"] = list(self.hosts)
        if self.ports:
            made["port"] = list(self.ports)
        if login is not None:
            made["user"], made["password"] = login
        return made

    def for_notices(self) -> PostgresAddress:
        """The address that notices come from: that of the URL, or its `notify_address`."""
        if not self.options.notify_address:
            return self
        host, port = _host_and_port(self.options.notify_address)
        options = msgspec.structs.replace(self.options, notify_address="", pooling="auto")
        label = f"{self.options.notify_address} (notify_address)"
        return replace(self, hosts=(host,), ports=(port,), options=options, label=label)


def parse_postgres_url(url: str) -> PostgresAddress:
    """Parse a PostgreSQL URL; raises `UsageError`, whose message never contains the password.

    `host` and `port` of the query replace those of the address, `application_name` replaces ours,
    `connect_timeout` is in seconds.

    >>> made = parse_postgres_url("postgresql://u@h/db?host=/run/pg&sslmode=verify-full&idle_s=5")
    >>> made.hosts, made.dsn, made.options.idle_s
    (('/run/pg',), 'postgresql://u@h/db?sslmode=verify-full', 5.0)
    """
    address, _, query = url.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    name = given.pop("application_name", "") or "tenure"
    timeout = given.pop("connect_timeout", "")
    if timeout and not timeout.isdecimal():
        raise UsageError(f"connect_timeout {timeout!r} in the PostgreSQL URL: a number of seconds")
    hosts = given.pop("host", "")
    ports = given.pop("port", "") if hosts else ""
    login = {each: given.pop(each) for each in LOGIN_OPTIONS & given.keys()}
    check_login(login, "PostgreSQL")
    options = _read_options({each: given.pop(each) for each in STORE_OPTIONS & given.keys()})
    for each in sorted(_OF_LIBPQ_ONLY & given.keys()):
        raise UsageError(
            f"{each} in the PostgreSQL URL: an option of libpq that the driver here, asyncpg, does "
            "not have; leave it out"
        )
    parts = urlsplit(address)
    user = given.get("user") or parts.username or ""
    return PostgresAddress(
        dsn=address + (f"?{urlencode(given, quote_via=quote)}" if given else ""),
        label=(parts.netloc.rpartition("@")[2] or hosts or "its socket") + parts.path,
        user=user,
        options=options,
        settings={"application_name": name},
        connect_timeout_s=float(timeout or 0) or _CONNECT_TIMEOUT_S,
        hosts=tuple(hosts.split(",")) if hosts else (),
        ports=tuple(_port(each) for each in ports.split(",")) if ports else (),
        login=login,
    )


def libpq_url(url: str) -> str:
    """The URL for a client that is libpq, with the login of now; may block.

    >>> libpq_url("postgresql://u@h/db?sslmode=require&pooling=session&work_mem=8MB")
    'postgresql://u@h/db?sslmode=require&options=-c%20work_mem%3D8MB'
    """
    address, _, query = url.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    login = parse_postgres_url(url).current_login()
    kept = {name: value for name, value in given.items() if name in _OF_BOTH}
    settings = [
        f"-c {name}={value}"
        for name, value in given.items()
        if name not in _OF_BOTH | STORE_OPTIONS
    ]
    if settings:
        kept["options"] = " ".join([kept["options"]] * ("options" in kept) + settings)
    if login is not None:
        kept["user"], kept["password"] = login
    return address + (f"?{urlencode(kept, quote_via=quote)}" if kept else "")


def _read_options(given: Mapping[str, str]) -> PostgresOptions:
    try:
        options = msgspec.convert(given, PostgresOptions, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"PostgreSQL URL: {error}") from None
    if not 0 < options.idle_s <= _DAY_S:
        raise UsageError(f"idle_s is {options.idle_s}; it is above 0 and at most {_DAY_S}")
    if not 0 <= options.statement_timeout_ms < 2**31:
        raise UsageError("statement_timeout_ms is a number of milliseconds, or 0")
    if options.notify_address:
        _host_and_port(options.notify_address)
    return options


def _host_and_port(text: str) -> tuple[str, int]:
    """A host or folder of a socket, and its port."""
    host, mark, port = text.rpartition(":")
    if not mark or port.endswith("]"):
        host, port = text, str(_PORT)
    if not host or "," in host or "@" in host or "://" in text:
        raise UsageError(
            f"notify_address {text!r}: it is host:port of the PostgreSQL server behind the pooler; "
            "login and database are those of the URL"
        )
    return host.strip("[]"), _port(port)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 65_536):
        raise UsageError(f"{text[:20]!r} in the PostgreSQL URL is not a port")
    return int(text)
