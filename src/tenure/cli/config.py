"""Settings and where they come from: flags over TENURE_* over tenure.toml over defaults.

Only this module reads the environment and settings files. `worker.concurrency` is
`TENURE_WORKER_CONCURRENCY` in the environment and `concurrency` of the table `[worker]` in
tenure.toml. A setting that may contain a secret (keys, URLs) can be read from a file, which
`TENURE_LLM_KEY_FILE` or systemd's LoadCredential=TENURE_LLM_KEY names.

A running `tenure up` writes `up.json` into its data folder, so that other commands find its queues.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from tenure.core.errors import UsageError
from tenure.store.files import why_untrusted, write_private

_Kind = Literal["text", "integer", "number", "list"]
_Value = str | int | float | list[str]

_PREFIX = "TENURE_"
DEFAULT_CONTRACT = "streams"

DATA_FOLDER = ".tenure"
"""The default of the setting `data`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. The default "" means that a text is not set.

    `alias` is a variable that a contract names; ours wins over it.
    """

    name: str
    default: _Value
    help: str
    kind: _Kind = "text"
    secret: bool = False
    alias: str = ""

    @property
    def sensitive(self) -> bool:
        """Whether it may contain a secret, and so may be read from a file."""
        return self.secret or self.name.endswith(("url", "queues"))

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return _PREFIX + self.name.replace(".", "_").upper()


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            "queue_url",
            f"{DEFAULT_CONTRACT}+redis://127.0.0.1:6379/0",
            "the queue that commands use",
        ),
        Setting("gateway_url", "", "submit and watch through this gateway instead of the store"),
        Setting("api_key", "", "the API key for that gateway", secret=True),
        Setting("data", DATA_FOLDER, "the folder in which `tenure up` keeps its data"),
        Setting("redis_url", "", "a Redis that `tenure up` uses instead of starting one"),
        Setting("postgres_url", "", "where `tenure up` keeps inbox and plane; else SQLite"),
        Setting("log_level", "info", "debug, info, warning or error"),
        Setting("log_format", "auto", "json, text, or auto: text on a terminal, json elsewhere"),
        Setting("gateway.host", "127.0.0.1", "the address the gateway listens on"),
        Setting("gateway.port", 8470, "the port the gateway listens on", "integer"),
        Setting("gateway.admin_address", "", "host:port for requests of admins and observers"),
        Setting("gateway.queues", [], "the queues a gateway serves; empty: queue_url", "list"),
        Setting("gateway.redact", [], "further names to mask; -name, /pattern/", "list"),
        Setting("gateway.audit_keep", 10_000, "how many entries the audit log keeps", "integer"),
        Setting("gateway.trace_url", "", "where a trace is shown; {trace_id} is replaced"),
        Setting("gateway.lake", "lake", "the folder of the pipeline's history, for its page"),
        Setting(
            "gateway.ttl_s",
            86_400,
            "how long a job is kept by default (also JOB_TTL_S)",
            "integer",
            alias="JOB_TTL_S",
        ),
        Setting("gateway.streams_per_key", 20, "open event streams per key", "integer"),
        Setting(
            "gateway.heartbeat_s", 15.0, "interval of heartbeats on a silent event stream", "number"
        ),
        Setting("gateway.depth_per_key", 100_000, "unfinished jobs per key and queue", "integer"),
        Setting("gateway.rate_per_s", 1_000.0, "requests a second per key; 0: no limit", "number"),
        Setting("gateway.rate_burst", 2_000, "burst of requests per key; 0: rate_per_s", "integer"),
        Setting("gateway.body_bytes_max", 204_800, "largest body of a request", "integer"),
        Setting("gateway.body_timeout_s", 30.0, "how long a body may take to arrive", "number"),
        Setting("gateway.form_bytes_max", 1_048_576, "largest form of the dashboard", "integer"),
        Setting("gateway.head_bytes_max", 32_768, "largest request line and headers", "integer"),
        Setting(
            "gateway.head_timeout_s", 10.0, "how long the headers may take to arrive", "number"
        ),
        Setting("gateway.idle_timeout_s", 20, "how long a connection may be idle", "integer"),
        Setting("gateway.connections_max", 4_000, "open connections", "integer"),
        Setting(
            "gateway.connections_per_address",
            1_000,
            "open connections per client address",
            "integer",
        ),
        Setting(
            "gateway.drain_timeout_s",
            10.0,
            "how long running requests may take at shutdown",
            "number",
        ),
        Setting("gateway.session_s", 43_200.0, "how long a browser stays signed in", "number"),
        Setting(
            "gateway.session_idle_s",
            7_200.0,
            "how long it stays signed in without a request",
            "number",
        ),
        Setting(
            "gateway.failed_logins_per_min",
            30,
            "wrong keys a minute per address and per key, then 429; 0: no limit",
            "integer",
        ),
        Setting(
            "gateway.trusted_proxies",
            [],
            "proxies (address, network, or `unix`) whose headers name the client and the user",
            "list",
        ),
        Setting(
            "gateway.sso_groups",
            [],
            "GROUP=SCOPE+SCOPE@TENANT: the scopes of a group's users; the first match wins",
            "list",
        ),
        Setting("gateway.sso_user_header", "X-Forwarded-User", "the header with the user's name"),
        Setting(
            "gateway.sso_groups_header", "X-Forwarded-Groups", "the header with the user's groups"
        ),
        Setting("worker.queues", [], "the queues a worker serves (comma separated)", "list"),
        Setting(
            "worker.concurrency", 0, "concurrent attempts in a worker; 0: its default", "integer"
        ),
        Setting("worker.processes", 1, "worker processes", "integer"),
        Setting("worker.lease_ms", 0, "how long a lease lasts; 0: the contract's own", "integer"),
        Setting(
            "worker.drain_timeout_s", 30.0, "how long running jobs may take at shutdown", "number"
        ),
        Setting(
            "worker.unknown_task_s",
            3_600.0,
            "how long jobs without a handler wait for one",
            "number",
        ),
        Setting("worker.metrics_port", 0, "the port for Prometheus metrics; 0: none", "integer"),
        Setting("worker.otlp_url", "", "a collector for spans, such as http://127.0.0.1:4318"),
        Setting("llm.url", "", "an OpenAI-compatible server, such as http://127.0.0.1:8080/v1"),
        Setting("llm.model", "", "the model to use; empty: the first one that the server lists"),
        Setting("llm.key", "", "the API key for that server", secret=True),
        Setting("llm.embed_model", "", "the model for /v1/embeddings; empty: llm.model"),
        Setting("llm.timeout_s", 120.0, "longest wait for the next chunk of an answer", "number"),
        Setting("rag.folder", "", "text files that `rag` searches when a job brings none"),
        Setting("tools", "", "the TOML file that says what the task `tool` may do"),
        Setting("vault.keys", "", "the key ring: `id=base64` lines, active one first", secret=True),
        Setting("vault.kms", "", "a function that returns your own key ring (module:function)"),
        Setting("egress.allow", [], "private hosts and networks that jobs may reach", "list"),
        Setting(
            "webhooks.headers",
            "contract",
            "contract, or standard: Standard Webhooks headers as well",
        ),
        Setting(
            "webhooks.per_key",
            0,
            "concurrent deliveries per key in a worker; 0: no limit",
            "integer",
        ),
        Setting("webhooks.secrets", "", "lines `requester = secret`; * is for all", secret=True),
        Setting("transcode.folder", "", "where transcoding keeps its files; empty: below TMPDIR"),
        Setting("transcode.files", "", "the one folder that file:// may name; empty: none"),
        Setting(
            "transcode.per_key",
            0,
            "concurrent transcodes per key, of all workers; 0: no limit",
            "integer",
        ),
        Setting("transcode.source_bytes_max", 20 * 1024**3, "largest source to fetch", "integer"),
        Setting("transcode.ffmpeg", "", "the ffmpeg to run; empty: the system's, else the wheel's"),
        Setting(
            "transcode.require",
            [],
            "sandbox features without which the worker refuses to start: network, files, syscalls",
            "list",
        ),
        Setting("transcode.readable", [], "further paths that ffmpeg may read", "list"),
        Setting("transcode.output_bytes_max", 4 * 1024**3, "largest output", "integer"),
        Setting("transcode.memory_bytes_max", 4 * 1024**3, "memory of an ffmpeg", "integer"),
        Setting("transcode.cpu_s_max", 4 * 3600, "processor time of an ffmpeg", "integer"),
        Setting("transcode.wall_s_max", 4 * 3600.0, "how long an ffmpeg may run", "number"),
        Setting("transcode.threads_max", 1024, "threads and processes of an ffmpeg", "integer"),
    )
}


_FILE_NAME = "tenure.toml"
_UP = "`tenure up`"
_WATCHDOG = ("WATCHDOG_PID", "WATCHDOG_USEC")


@dataclass(frozen=True, slots=True)
class Found:
    """A setting's value and where it was found."""

    value: _Value
    origin: str


class Config:
    """The settings of this process; a flag wins over all other sources."""

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self._environment = environment
        self._folder = folder
        self._file, self._table = _read_file(environment, folder)

    def find(self, name: str, flag: _Value | None = None) -> Found:
        """The value of a setting and its origin."""
        setting = SETTINGS[name]
        if flag is not None and flag != []:
            return Found(flag, "flag")
        return (
            self._from_environment(setting)
            or self._from_file(setting)
            or self._from_running_up(setting)
            or Found(setting.default, "default")
        )

    def text(self, name: str, flag: str | None = None) -> str:
        return str(self.find(name, flag).value)

    def integer(self, name: str, flag: int | None = None) -> int:
        return int(cast("int", self.find(name, flag).value))

    def number(self, name: str, flag: float | None = None) -> float:
        return float(cast("float", self.find(name, flag).value))

    def texts(self, name: str, flag: tuple[str, ...] = ()) -> list[str]:
        return list(cast("list[str]", self.find(name, list(flag)).value))

    def is_set(self, name: str) -> bool:
        """Whether a flag, variable or file sets this."""
        return self.find(name).origin != "default"

    @property
    def data(self) -> Path:
        """The data folder, absolute."""
        return (self._folder / Path(self.text("data")).expanduser()).absolute()

    @property
    def unknown_variables(self) -> list[str]:
        """TENURE_* variables that look like a misspelt setting."""
        known = {setting.variable for setting in SETTINGS.values()}
        known |= {f"{setting.variable}_FILE" for setting in SETTINGS.values() if setting.sensitive}
        import difflib

        unknown = [
            name for name in self._environment if name.startswith(_PREFIX) and name not in known
        ]
        return sorted(n for n in unknown if difflib.get_close_matches(n, known, n=1, cutoff=0.85))

    def _from_environment(self, setting: Setting) -> Found | None:
        name = setting.variable
        if text := self._environment.get(name):
            return Found(_parse(setting, text, name), f"environment {name}")
        if setting.alias and (text := self._environment.get(setting.alias)):
            return Found(_parse(setting, text, setting.alias), f"environment {setting.alias}")
        if not setting.sensitive:
            return None
        if path := self._environment.get(f"{name}_FILE"):
            return Found(_read_secret(setting, path, f"{name}_FILE"), f"environment {name}_FILE")
        credentials = self._environment.get("CREDENTIALS_DIRECTORY")
        if credentials and (Path(credentials) / name).is_file():
            found = _read_secret(setting, f"{credentials}/{name}", name)
            return Found(found, f"credential {name}")
        return None

    def _from_file(self, setting: Setting) -> Found | None:
        if setting.name in self._table:
            return Found(
                _parse(setting, self._table[setting.name], str(self._file)), str(self._file)
            )
        path = self._table.get(f"{setting.name}_file") if setting.sensitive else None
        origin = str(self._file)
        return Found(_read_secret(setting, str(path), origin), origin) if path else None

    def _from_running_up(self, setting: Setting) -> Found | None:
        if setting.name not in ("queue_url", "redis_url"):
            return None
        up = running_up(self.data)
        return Found(getattr(up, setting.name), f"{_UP} in {self.data}") if up else None

    def queue_urls(self) -> list[str]:
        """The queues to show: the configured ones, else all of a running `tenure up`."""
        named = self.texts("worker.queues")
        found = self.find("queue_url")
        up = None if named or not found.origin.startswith(_UP) else running_up(self.data)
        return named or (up.queues if up else []) or [str(found.value)]


def load_config() -> Config:
    """The configuration of this process."""
    return Config(os.environ, Path.cwd())


def debug_wanted() -> bool:
    """TENURE_DEBUG: show the traceback of an error."""
    return bool(os.environ.get("TENURE_DEBUG"))


def colours_wanted(stream: Any) -> bool:
    """True on a terminal, unless NO_COLOR is set (no-color.org) or the terminal is dumb."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(stream.isatty())


def browser_possible() -> bool:
    """Whether there is a terminal and a desktop that can show a page."""
    desktop = (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin"
    )
    return bool(desktop) and sys.stdout.isatty()


def process_environment() -> Mapping[str, str]:
    """The environment, for the few things that are not settings (POD_NAME)."""
    return os.environ


def child_environment() -> dict[str, str]:
    """Our environment for child processes, with text logs unless a format is set.

    The variables of systemd are left out: they are for this process only.
    """
    ours = {k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", *_WATCHDOG)}
    return {"TENURE_LOG_FORMAT": "text", "PYTHONUNBUFFERED": "1", **ours}


def as_list(values: Iterable[str]) -> str:
    """A list as an environment variable: one line each, since URLs may contain commas."""
    return "".join(f"{value}\n" for value in values)


def with_options(url: str, **options: object) -> str:
    """The queue URL with further options.

    >>> with_options("streams+redis://h/0?ttl_s=60", lease_ms=5000), with_options("memory://a")
    ('streams+redis://h/0?ttl_s=60&lease_ms=5000', 'memory://a')
    """
    for name, value in options.items():
        url += f"{'&' if '?' in url else '?'}{name}={value}"
    return url


def notify_address() -> tuple[str, int]:
    """The socket of systemd, and the watchdog's interval in milliseconds (0: no watchdog)."""
    pid, usec = (os.environ.get(name, "") for name in _WATCHDOG)
    for_us = not pid or pid == str(os.getpid())
    watchdog_ms = int(usec) // 1000 if usec.isdigit() and for_us else 0
    return os.environ.get("NOTIFY_SOCKET", ""), watchdog_ms


def _read_file(environment: Mapping[str, str], folder: Path) -> tuple[Path, dict[str, Any]]:
    named = environment.get("TENURE_CONFIG")
    path = folder / Path(named or _FILE_NAME).expanduser()
    if not path.exists():
        if named:
            raise UsageError(f"TENURE_CONFIG names {path}, which does not exist")
        return path, {}
    import tomllib

    try:
        table = _flatten(tomllib.loads(_read_trusted(path, chosen=bool(named))))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    for name in table:
        _check_name(path, name)
    return path, table


def _read_trusted(path: Path, *, chosen: bool) -> str:
    """The text of a regular file; raises if other users could have written it.

    Settings decide where jobs and secrets are sent. `chosen` means that the user named the file.
    """

    def at_once(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # opening a FIFO would wait for a writer

    with open(path, encoding="utf-8", opener=at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path} is no regular file; settings and secrets are read from one")
        why = why_untrusted(found, chosen=chosen)
        if not chosen and not why:
            why = why_untrusted(path.lstat())  # another user's link to a file of ours
        if why:
            named = "" if chosen else " (one that TENURE_CONFIG names may be another user's)"
            raise UsageError(
                f"{path} {why}, who could send jobs and secrets elsewhere; it must be yours or "
                f"root's{named}, and not open to all: `chmod o-w {path}`"
            )
        if not chosen and found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid():
            from tenure.core.encoding import printable

            warning = f"warning: {path} can be written by group {found.st_gid}: `chmod g-w {path}`"
            sys.stderr.write(printable(warning) + "\n")
        return file.read()


def read_secret_file(path: str) -> str:
    """The text of a file that an option or setting names."""
    return _read_trusted(Path(path).expanduser(), chosen=True).strip()


def _flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": found for inner, found in value.items()}
        else:
            flat[key] = value
    return flat


def _check_name(path: Path, name: str) -> None:
    known = [*SETTINGS, *(f"{s.name}_file" for s in SETTINGS.values() if s.sensitive)]
    if name not in known:
        import difflib

        close = difflib.get_close_matches(name, known, n=1)
        hint = f", did you mean {close[0]!r}?" if close else "; `tenure config show` lists them"
        raise UsageError(f"{path}: there is no setting {name!r}{hint}")


def _parse(setting: Setting, raw: Any, where: str) -> _Value:
    try:
        match setting.kind:
            case "text" if isinstance(raw, str):
                return raw
            case "integer" if not isinstance(raw, bool | float) and is_storable(int(raw)):
                return int(raw)
            case "number" if not isinstance(raw, bool) and is_storable(float(raw)):
                return float(raw)
            case "list":
                parts = raw.split("\n" if "\n" in raw else ",") if isinstance(raw, str) else raw
                return [str(part).strip() for part in parts if str(part).strip()]
    except (TypeError, ValueError):
        pass
    raise UsageError(
        f"{where}: {setting.name} is {repr(raw)[:80]}, which is not a valid {setting.kind}"
    )


def is_storable(number: float) -> bool:
    """Whether stores and clocks can represent this number.

    >>> [is_storable(number) for number in (0, -1.5, 2**53, float("inf"), float("nan"), 10**400)]
    [True, True, True, False, False, False]
    """
    return abs(number) <= 2**53


def _read_secret(setting: Setting, path: str, where: str) -> _Value:
    """The value in a file; a list has one line per item."""
    try:
        text = read_secret_file(path)
    except OSError as error:
        raise UsageError(f"{where}: the secret's file cannot be read: {error}") from None
    return _parse(setting, text.splitlines() if setting.kind == "list" else text, where)


_UP_FILE = "up.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningUp:
    """The process and the addresses of a running `tenure up`.

    `queue_url` is the first of the `queues` that its worker serves.
    """

    pid: int
    gateway_url: str
    queue_url: str
    redis_url: str
    started_ms: int
    queues: list[str] = field(default_factory=list)


def running_up(folder: Path) -> RunningUp | None:
    """The `tenure up` that uses this data folder, if its process is alive.

    A file of another user is ignored: it could send our jobs to a store of theirs.
    """
    import msgspec

    try:
        with (folder / _UP_FILE).open("rb") as file:
            is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
            up = msgspec.json.decode(file.read(), type=RunningUp)
    except (OSError, msgspec.MsgspecError):
        return None
    return up if is_ours and _is_alive(up.pid) else None


def announce_up(folder: Path, up: RunningUp) -> None:
    """Write `up.json` atomically; it contains a password, so only its owner may read it."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(up), indent=2).decode()
    write_private(folder / _UP_FILE, text + "\n")


def withdraw_up(folder: Path) -> None:
    """Remove `up.json`."""
    (folder / _UP_FILE).unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's process
    return True
