"""Redis URLs: one server, a primary that Sentinels know, or a cluster; TLS and credentials.

redis://[user[:password]@]host[:port][/db]          rediss:// with TLS; valkey://, valkeys://
redis+unix:///path/to/socket?db=0                   unix:///path/to/socket
redis+sentinel://host[:port],host.../service[/db]   the Sentinels; they name the primary
redis+cluster://host[:port],host...                 some nodes; they name the others
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from tenure.core.errors import UsageError
from tenure.store.credentials import LOGIN_OPTIONS, check_login, current_login

Arg = bytes | str | int | float
Topology = Literal["single", "sentinel", "cluster"]

_PORT = 6379
_SENTINEL_PORT = 26379
_PLAIN = {"redis", "valkey"}
_TLS = {"rediss", "valkeys"}
_UNIX = {"unix", "redis+unix", "valkey+unix"}
_TLS_OPTIONS = {"cafile", "certfile", "keyfile", "ssl_cert_reqs", "check_hostname"}
# The names of redis-py, so that its URLs can be used as they are.
_ALIASES = {
    "ssl_ca_certs": "cafile",
    "ssl_certfile": "certfile",
    "ssl_keyfile": "keyfile",
    "ssl_check_hostname": "check_hostname",
}
_SENTINEL_OPTIONS = {"sentinel_user", "sentinel_password"}
_REPLICA_OPTIONS = {"replicas", "replicas_ms"}
STORE_OPTIONS = frozenset(
    {"db"} | _TLS_OPTIONS | _ALIASES.keys() | LOGIN_OPTIONS | _SENTINEL_OPTIONS
)
"""The options of a Redis URL that say how to connect. Data beside the jobs has the same ones."""
_VERIFY = {"required": ssl.CERT_REQUIRED, "optional": ssl.CERT_OPTIONAL, "none": ssl.CERT_NONE}
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_REPLICAS_MAX = 100
_REPLICAS_MS = 1_000
_REPLICAS_MS_MAX = 60_000
_FORMS = (
    "redis://host:6379/0, rediss://host:6379/0?cafile=ca.pem, redis+unix:///path/to/socket?db=0, "
    "redis+sentinel://host1,host2,host3/service/0 or redis+cluster://host1,host2"
)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed Redis URL; `path` is set for a unix socket, `host` and `port` otherwise.

    `hosts` are the Sentinels or some nodes of a cluster, `service` is the primary's name there.
    A submit waits `replicas_ms` at most until so many `replicas` have it (0: it does not wait).
    """

    host: str = ""
    port: int = _PORT
    path: str = ""
    db: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    cafile: str = ""
    certfile: str = ""
    keyfile: str = ""
    ssl_cert_reqs: str = "required"
    check_hostname: bool = True
    password_file: str = ""
    password_command: str = field(default="", repr=False)
    credentials: str = ""
    topology: Topology = "single"
    hosts: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_user: str = ""
    sentinel_password: str = field(default="", repr=False)
    replicas: int = 0
    replicas_ms: int = _REPLICAS_MS

    @property
    def label(self) -> str:
        """The address without credentials, for errors and logs."""
        if self.path:
            return f"redis+unix://{self.path}?db={self.db}"
        scheme = "rediss" if self.tls else "redis"
        if self.topology == "single":
            return f"{scheme}://{_host_text(self.host, self.port)}/{self.db}"
        hosts = ",".join(_host_text(*each) for each in self.hosts)
        if self.topology == "cluster":
            return f"{scheme}+cluster://{hosts}"
        return f"{scheme}+sentinel://{hosts}/{self.service}/{self.db}"

    def node(self, host: str, port: int) -> RedisAddress:
        """One server of this cluster, or the primary that the Sentinels named."""
        return replace(self, host=host, port=port, topology="single", hosts=(), service="")

    def servers(self) -> list[RedisAddress]:
        """The nodes that the URL names, or the Sentinels, which have a login of their own."""
        own = self
        if self.topology == "sentinel":
            user, password = self.sentinel_user, self.sentinel_password
            own = replace(self, user=user, password=password, db=0)
            own = replace(own, password_file="", password_command="", credentials="")
        return [own.node(*each) for each in self.hosts]

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
        context.check_hostname = self.check_hostname and self.ssl_cert_reqs != "none"
        context.verify_mode = _VERIFY[self.ssl_cert_reqs]
        return context

    @property
    def asks_for_login(self) -> bool:
        """Whether user and password come from a file, a command or a function, at every dial."""
        return bool(self.password_file or self.password_command or self.credentials)

    def login(self) -> tuple[str, str]:
        """The user and the password of now; may block, raises StoreUnreachable if there is none."""
        if not self.asks_for_login:
            return self.user, self.password
        return current_login(
            self.label,
            self.user,
            file=self.password_file,
            command=self.password_command,
            provider=self.credentials,
        )

    def greeting(self, client_name: str, login: tuple[str, str]) -> list[tuple[Arg, ...]]:
        """The commands that open a connection."""
        commands: list[tuple[Arg, ...]] = []
        user, password = login
        if password or user:
            commands.append(("AUTH", *([user] if user else ()), password))
        if self.db:
            commands.append(("SELECT", self.db))
        return [*commands, ("CLIENT", "SETNAME", client_name)]


def parse_address(url: str) -> RedisAddress:
    """Parse a Redis URL; raises UsageError, whose message never contains the password."""
    scheme, mark, rest = url.partition("://")
    try:
        # In an option of another URL, such as a plane's `redis`, a plus means a blank.
        parts = urlsplit(scheme.replace(" ", "+") + mark + rest)
        options = dict(
            parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        )
        login, _, places = parts.netloc.rpartition("@")
        hosts = [_host_of(each) for each in places.split(",")]
    except ValueError:
        # The parser's message may contain the password.
        raise UsageError(f"this Redis URL cannot be read; expected {_FORMS}") from None
    user, _, password = login.partition(":")
    named = {"user": unquote(user), "password": unquote(password)}
    if parts.scheme in _UNIX:
        return _unix_address(parts, options, named)
    family, _, kind = parts.scheme.partition("+")
    if family not in _PLAIN | _TLS or kind not in ("", "sentinel", "cluster"):
        raise UsageError(f"{parts.scheme or 'an empty scheme'}: not a Redis URL; expected {_FORMS}")
    tls = family in _TLS
    options = {_ALIASES.get(name, name): value for name, value in options.items()}
    known = {"db"} | LOGIN_OPTIONS | _REPLICA_OPTIONS | (_TLS_OPTIONS if tls else set())
    _check_options(options, known | (_SENTINEL_OPTIONS if kind == "sentinel" else set()))
    if "keyfile" in options and "certfile" not in options:
        raise UsageError("a Redis URL with keyfile needs certfile as well")
    read = _typed(options)
    if kind == "sentinel":
        return _sentinel_address(parts, hosts, tls, {**read, **named})
    db = _database_of(parts.path.strip("/"), read)
    if kind == "cluster":
        if db:
            raise UsageError("a Redis Cluster has database 0 only: leave the number out")
        nodes = tuple((host, port or _PORT) for host, port in hosts)
        return RedisAddress(hosts=nodes, topology="cluster", tls=tls, **{**read, **named})
    if len(hosts) > 1:
        raise UsageError(
            "a redis:// URL names one server; several are redis+sentinel://h1,h2,h3/service/0 or "
            "redis+cluster://h1,h2"
        )
    host, port = hosts[0]
    return RedisAddress(
        host=host, port=_PORT if port is None else port, db=db, tls=tls, **{**read, **named}
    )


def _unix_address(
    parts: SplitResult, options: dict[str, str], named: Mapping[str, Any]
) -> RedisAddress:
    _check_options(options, {"db"} | LOGIN_OPTIONS | _REPLICA_OPTIONS)
    if not parts.path.strip("/"):
        raise UsageError(f"a {parts.scheme}:// URL needs the socket's path; expected {_FORMS}")
    read = _typed(options)
    db = _database(read.pop("db", ""))
    return RedisAddress(path=unquote(parts.path), db=db, **{**read, **named})


def _sentinel_address(
    parts: SplitResult,
    hosts: list[tuple[str, int | None]],
    tls: bool,
    read: dict[str, Any],
) -> RedisAddress:
    service, _, number = unquote(parts.path.strip("/")).partition("/")
    if not service or service.isdigit():
        raise UsageError(
            "a redis+sentinel:// URL names the service that the Sentinels watch: "
            "redis+sentinel://host1,host2,host3/service/0"
        )
    db = _database_of(number, read)
    asked = tuple((host, port or _SENTINEL_PORT) for host, port in hosts)
    return RedisAddress(hosts=asked, topology="sentinel", service=service, db=db, tls=tls, **read)


def _host_of(text: str) -> tuple[str, int | None]:
    """Host and port of one place in a URL; raises ValueError."""
    parts = urlsplit(f"//{text}")
    return parts.hostname or "localhost", parts.port


def _host_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_options(options: Mapping[str, str], known: set[str]) -> None:
    unknown = sorted(options.keys() - known)
    if unknown:
        names = ", ".join(sorted(known))
        raise UsageError(f"unknown option {unknown[0]!r} in the Redis URL; known here: {names}")


def _typed(options: Mapping[str, str]) -> dict[str, Any]:
    """The options with the values that are not texts."""
    read: dict[str, Any] = dict(options)
    if "check_hostname" in read:
        truth = _TRUTH.get(read["check_hostname"].lower())
        if truth is None:
            raise UsageError("check_hostname in the Redis URL is true or false")
        read["check_hostname"] = truth
    if "ssl_cert_reqs" in read:
        read["ssl_cert_reqs"] = read["ssl_cert_reqs"].lower().removeprefix("cert_")
        if read["ssl_cert_reqs"] not in _VERIFY:
            raise UsageError("ssl_cert_reqs in the Redis URL is required, optional or none")
    check_login(read, "Redis")
    if "replicas" in read:
        read["replicas"] = _whole("replicas", read["replicas"], 1, _REPLICAS_MAX)
    if "replicas_ms" in read:
        if "replicas" not in read:
            raise UsageError("a Redis URL with replicas_ms needs replicas as well")
        read["replicas_ms"] = _whole("replicas_ms", read["replicas_ms"], 1, _REPLICAS_MS_MAX)
    return read


def _whole(name: str, text: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not least <= int(text) <= most:
        raise UsageError(f"{name} in the Redis URL is a whole number from {least} to {most}")
    return int(text)


def _database_of(in_path: str, read: dict[str, Any]) -> int:
    if in_path and "db" in read:
        raise UsageError("a Redis URL names its database once: either /0 or ?db=0")
    return _database(in_path or read.pop("db", ""))


def _database(text: str) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UsageError(
            f"{text[:20]!r} is not a Redis database number; expected a number such as 0"
        )
    return int(text)
