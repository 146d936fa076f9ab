"""All settings, and what else commands read from their environment; see `core/config.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tenure.core import config as sources
from tenure.core.config import DATA, QUEUE_URL, UP, RunningUp, Setting, running_up
from tenure.core.errors import UsageError
from tenure.store.files import write_private

SETTINGS = {
    setting.name: setting
    for setting in (
        QUEUE_URL,
        Setting("gateway_url", "", "submit and watch through this gateway instead of the store"),
        Setting("api_key", "", "the API key for that gateway", secret=True),
        DATA,
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
        Setting("worker.metrics_host", "127.0.0.1", "the address for metrics and health"),
        Setting("worker.metrics_port", 0, "the port for metrics and health; 0: none", "integer"),
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


_WATCHDOG = ("WATCHDOG_PID", "WATCHDOG_USEC")


class Config(sources.Config):
    """The settings of a command."""

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        super().__init__(environment, folder, SETTINGS)
        for name in self._table:
            _check_name(self._file, name)

    @property
    def unknown_variables(self) -> list[str]:
        """TENURE_* variables that look like a misspelt setting."""
        known = {setting.variable for setting in SETTINGS.values()}
        known |= {f"{setting.variable}_FILE" for setting in SETTINGS.values() if setting.sensitive}
        import difflib

        unknown = [
            name for name in self._environment if name.startswith("TENURE_") and name not in known
        ]
        return sorted(n for n in unknown if difflib.get_close_matches(n, known, n=1, cutoff=0.85))

    def queue_urls(self, flag: tuple[str, ...] = ()) -> list[str]:
        """The queues to show: the given or configured ones, else all of a running `tenure up`."""
        named = self.texts("worker.queues", flag)
        found = self.find("queue_url")
        up = None if named or not found.origin.startswith(UP) else running_up(self.data)
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


def _check_name(path: Path, name: str) -> None:
    if name.startswith("queues."):
        return
    known = [*SETTINGS, *(f"{s.name}_file" for s in SETTINGS.values() if s.sensitive)]
    if name not in known:
        import difflib

        close = difflib.get_close_matches(name, known, n=1)
        hint = f", did you mean {close[0]!r}?" if close else "; `tenure config show` lists them"
        raise UsageError(f"{path}: there is no setting {name!r}{hint}")


def announce_up(folder: Path, up: RunningUp) -> None:
    """Write `up.json` atomically; it contains a password, so only its owner may read it."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(up), indent=2).decode()
    write_private(folder / sources.UP_FILE, text + "\n")


def withdraw_up(folder: Path) -> None:
    """Remove `up.json`."""
    (folder / sources.UP_FILE).unlink(missing_ok=True)
