"""The commands that serve until they are stopped: worker, gateway and receiver.

Heavy modules are imported in functions, so that `--help` and wrong options answer fast.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from tenure.cli.config import (
    DEFAULT_CONTRACT,
    Config,
    as_list,
    child_environment,
    colours_wanted,
    load_config,
    notify_address,
    process_environment,
    read_secret_file,
    with_options,
)
from tenure.cli.console import emit_text, note, note_child_line
from tenure.core.errors import UsageError

if TYPE_CHECKING:
    from tenure.worker.events import Notifier

_LEVELS = ("debug", "info", "warning", "error")
_FORMATS = ("auto", "json", "text")


def set_up_logs(config: Config, level: str | None = None, *, add: Sequence[Any] = ()) -> str:
    """Send structlog and the standard library's logging to stderr; returns the level's name.

    `add` are further processors, such as the one that adds the ids of the running job.
    """
    import logging

    import structlog

    from tenure.worker.telemetry import PlainFormatter

    name, style = config.text("log_level", level).lower(), config.text("log_format")
    if name not in _LEVELS:
        raise UsageError(f"log_level is {name!r}; it is one of {', '.join(_LEVELS)}")
    if style not in _FORMATS:
        raise UsageError(f"log_format is {style!r}; it is one of {', '.join(_FORMATS)}")
    threshold = getattr(logging, name.upper())
    as_text = style == "text" or (style == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[*add, *_processors(as_text)],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter(logging.BASIC_FORMAT))
    logging.basicConfig(level=max(threshold, logging.WARNING), handlers=[handler], force=True)
    return name


def _processors(as_text: bool) -> list[Any]:
    import structlog

    from tenure.worker.telemetry import plain_errors, plain_text, text_renderer

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        plain_errors,
    ]
    if as_text:
        return [
            *shared,
            structlog.processors.TimeStamper(fmt="%H:%M:%S"),
            plain_text,
            text_renderer(colors=colours_wanted(sys.stderr), pad_event_to=0),
        ]
    return [
        *shared,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        structlog.processors.JSONRenderer(),
    ]


def _set_up_traces(otlp_url: str, worker_id: str) -> None:
    """Install a tracer provider; it sends the remaining spans when the process ends."""
    if not otlp_url.lower().startswith(("http://", "https://")):
        raise UsageError("worker.otlp_url is an http or https URL, such as http://127.0.0.1:4318")
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}; worker.otlp_url needs: pip install 'tenure[otel]'") from None
    names = {"service.name": "tenure-worker", "service.instance.id": worker_id}
    provider = TracerProvider(resource=Resource.create(names))
    exporter = OTLPSpanExporter(endpoint=f"{otlp_url.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


@click.command("worker")
@click.argument("targets", metavar="APP.py|MODULE...", nargs=-1, required=True)
@click.option(
    "--from", "queue_urls", metavar="URL", multiple=True, help="A queue to serve; repeatable."
)
@click.option("--concurrency", type=click.IntRange(min=1), help="Concurrent attempts.")
@click.option("--processes", type=click.IntRange(min=1), help="Worker processes (1).")
@click.option("--burst", is_flag=True, help="Stop when the queues are empty.")
@click.option("--drain-timeout", "drain_timeout_s", type=click.FloatRange(min=0), help="Seconds.")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="For Prometheus, on loopback.")
@click.option("--lease-ms", type=click.IntRange(min=1), help="How long a lease lasts.")
@click.option("--log-level", help="debug, info, warning or error.")
@click.option("--samples", is_flag=True, help="With tenure.tasks: samples where there is no model.")
@click.option("--only-load", is_flag=True, hidden=True)
def worker_command(targets: tuple[str, ...], queue_urls: tuple[str, ...], **flags: Any) -> int:
    """Run the @task functions of files (app.py) or modules.

    `tenure.tasks` are the built-in ones, `tenure.transcode` those of an inbox.

    The first SIGTERM or Ctrl-C lets running jobs finish, the second hands them back at once.

    \b
    tenure worker app.py
    tenure worker app.py --from 'bullmq+redis://127.0.0.1:6379/0?queue=mail' --concurrency 50
    tenure worker app.py --burst
    """
    config = load_config()
    if flags["only_load"]:
        from tenure.cli.handlers import load_all

        load_all(targets, config)
        return 0
    urls = config.texts("worker.queues", queue_urls) or [config.text("queue_url")]
    lease_ms = config.integer("worker.lease_ms", flags["lease_ms"])
    if lease_ms:
        urls = [with_options(url, lease_ms=lease_ms) for url in urls]
    if config.integer("worker.processes", flags["processes"]) > 1:
        return _run_many(targets, urls, config, flags)
    return _run_one(targets, urls, config, flags)


def _run_one(targets: Sequence[str], urls: list[str], config: Config, flags: dict[str, Any]) -> int:
    from tenure.cli.handlers import (
        INBOX,
        TRANSCODES,
        default_concurrency,
        load_all,
        with_share,
        with_slots,
    )
    from tenure.worker import Settings, Worker, identity
    from tenure.worker.telemetry import add_job

    level = set_up_logs(config, flags["log_level"], add=[add_job])
    concurrency = config.integer("worker.concurrency", flags["concurrency"])
    tasks = load_all(targets, config, samples=flags["samples"], urls=urls, concurrency=concurrency)
    if targets[0] == INBOX:
        per_key, slots = config.integer("transcode.per_key"), concurrency or TRANSCODES
        urls = [with_share(url, slots, per_key) for url in urls]
        urls = urls if concurrency else [with_slots(url) for url in urls]
    socket, watchdog_ms = notify_address()
    worker_id = identity(process_environment())
    otlp_url = config.text("worker.otlp_url")
    if otlp_url:
        _set_up_traces(otlp_url, worker_id)
    settings = Settings(
        worker_id=worker_id,
        tracing=bool(otlp_url),
        concurrency=concurrency or default_concurrency(targets[0]),
        drain_ms=round(config.number("worker.drain_timeout_s", flags["drain_timeout_s"]) * 1000),
        unknown_task_ms=round(config.number("worker.unknown_task_s") * 1000),
        burst=flags["burst"],
        debug=level == "debug",
        notify_socket=socket,
        watchdog_ms=watchdog_ms,
    )
    worker = Worker(tasks, queues=urls, settings=settings)
    port = config.integer("worker.metrics_port", flags["metrics_port"])
    if port:
        _serve_metrics(port, worker.registry)
    return worker.run()


def _serve_metrics(port: int, registry: Any) -> None:
    from prometheus_client import start_http_server

    try:
        start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise UsageError(
            f"--metrics-port {port} cannot be used ({error.strerror}); choose a free one"
        ) from None


def _run_many(
    targets: Sequence[str], urls: list[str], config: Config, flags: dict[str, Any]
) -> int:
    count = config.integer("worker.processes", flags["processes"])
    drain_s = config.number("worker.drain_timeout_s", flags["drain_timeout_s"])
    port = config.integer("worker.metrics_port", flags["metrics_port"])
    base = [sys.executable, "-P", "-m", "tenure.cli", "worker", *targets, "--processes", "1"]
    for name in ("concurrency", "log_level"):
        if flags[name] is not None:
            base += [f"--{name.replace('_', '-')}", str(flags[name])]
    base += ["--drain-timeout", str(drain_s)]
    base += ["--burst"] * flags["burst"] + ["--samples"] * flags["samples"]
    commands = [base + (["--metrics-port", str(port + n)] if port else []) for n in range(count)]
    queues = {"TENURE_WORKER_QUEUES": as_list(urls)}  # not in argv: a URL may contain a password
    return asyncio.run(_run_workers(commands, queues, drain_s=drain_s, once=flags["burst"]))


async def _run_workers(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], *, drain_s: float, once: bool
) -> int:
    """Run all commands until a signal, or with `once` until each has ended by itself.

    To systemd they are one service: it is ready when all children are, and this process, which
    restarts the children, feeds the watchdog.
    """
    from tenure.core.process import Supervisor, stop_on_signals
    from tenure.worker.events import Notifier

    address, watchdog_ms = notify_address()
    notifier = Notifier(address)
    stop = asyncio.Event()
    names = [f"worker{number}" for number in range(1, len(commands) + 1)]
    with _ReadyListener(len(names), notifier) as listener:
        ours = child_environment() | {"NOTIFY_SOCKET": listener.address}
        supervisor = Supervisor(note, {**ours, **environment}, note_child_line)
        with stop_on_signals(stop, supervisor.stop_now):
            for name, command in zip(names, commands, strict=True):
                await supervisor.start(name, command, once=once)
            watchdog = asyncio.create_task(_feed_watchdog(notifier, watchdog_ms))
            try:
                await supervisor.until(stop)
            finally:
                watchdog.cancel()
                notifier.stopping()
                await asyncio.gather(*(supervisor.stop(name, drain_s + 10) for name in names))
                notifier.close()
    return supervisor.worst_exit


class _ReadyListener:
    """Receives READY=1 from `count` children, as systemd would, then notifies systemd once."""

    def __init__(self, count: int, notifier: Notifier) -> None:
        self._count = count
        self._notifier = notifier
        self._ready = 0
        self.address = f"@tenure-{os.getpid()}-{secrets.token_hex(8)}"

    def __enter__(self) -> _ReadyListener:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._socket.bind("\0" + self.address[1:])
        asyncio.get_running_loop().add_reader(self._socket, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _receive(self) -> None:
        if b"READY=1" in self._socket.recv(4096):
            self._ready += 1
            if self._ready == self._count:
                self._notifier.ready(f"{self._count} worker processes")


async def _feed_watchdog(notifier: Notifier, watchdog_ms: int) -> None:
    while watchdog_ms:
        notifier.watchdog()
        await asyncio.sleep(watchdog_ms / 2000)


@click.command("gateway")
@click.option("--host", help="The address to listen on (127.0.0.1).")
@click.option("--port", type=click.IntRange(1, 65535), help="The port to listen on (8470).")
@click.option("--admin-address", metavar="HOST:PORT", help="Serve admins and observers only there.")
@click.option(
    "--from", "queue_urls", metavar="URL", multiple=True, help="A queue to serve; repeatable."
)
@click.option(
    "--redis", "redis_url", metavar="URL", help=f"Short for --from {DEFAULT_CONTRACT}+URL."
)
@click.option("--require-key", is_flag=True, help="Require an API key on loopback too.")
@click.option("--worker-key-file", help="A file with a further key for workers.")
@click.option(
    "--trusted-proxy",
    "trusted_proxies",
    metavar="ADDRESS",
    multiple=True,
    help="A proxy whose headers name the client and the user; repeatable.",
)
@click.option(
    "--sso-group",
    "sso_groups",
    metavar="GROUP=SCOPES",
    multiple=True,
    help="The scopes of a group's users, such as ops=admin; repeatable.",
)
@click.option("--log-level", help="debug, info, warning or error.")
def gateway_command(
    host: str | None,
    port: int | None,
    admin_address: str | None,
    queue_urls: tuple[str, ...],
    redis_url: str | None,
    require_key: bool,
    worker_key_file: str | None,
    trusted_proxies: tuple[str, ...],
    sso_groups: tuple[str, ...],
    log_level: str | None,
) -> None:
    """Serve the HTTP API of the queues, with event streams, metrics and health.

    Without API keys only on loopback; make one with `tenure keys create`.

    \b
    tenure gateway --from streams+redis://127.0.0.1:6379/0
    tenure gateway --host 0.0.0.0 --from 'inbox+sqlite:///jobs.db' --from 'plane+sqlite:///jobs.db'
    """
    config = load_config()
    urls = [*queue_urls, *([f"{DEFAULT_CONTRACT}+{redis_url}"] if redis_url else [])]
    from tenure.core.registry import has_part

    try:
        from tenure.gateway.server import run
        from tenure.gateway.settings import GatewaySettings
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}; install the gateway: pip install 'tenure[gateway]'") from None

    set_up_logs(config, log_level)
    queues = tuple(config.texts("gateway.queues", tuple(urls)) or [config.text("queue_url")])
    settings = GatewaySettings(
        queues=queues,
        host=config.text("gateway.host", host),
        port=config.integer("gateway.port", port),
        admin_address=config.text("gateway.admin_address", admin_address),
        anonymous=not require_key,
        worker_key=_first_line(worker_key_file) if worker_key_file else "",
        ttl_s=_ttl_s(config),
        route_options=_route_options(config)
        if any(has_part(url, "credentials") for url in queues)
        else {},
        redact=tuple(config.texts("gateway.redact")),
        audit_keep=config.integer("gateway.audit_keep"),
        trace_url=config.text("gateway.trace_url"),
        lake=config.text("gateway.lake"),
        trusted_proxies=tuple(config.texts("gateway.trusted_proxies", trusted_proxies)),
        sso_groups=tuple(config.texts("gateway.sso_groups", sso_groups)),
        sso_user_header=config.text("gateway.sso_user_header"),
        sso_groups_header=config.text("gateway.sso_groups_header"),
        **_limits(config),
    )
    address, watchdog_ms = notify_address()
    # A thread that parses a large body must yield to the event loop soon.
    sys.setswitchinterval(0.001)
    run(settings, notify_socket=address, watchdog_ms=watchdog_ms)


def _ttl_s(config: Config) -> int:
    found = config.find("gateway.ttl_s")
    ttl_s = config.integer("gateway.ttl_s")
    if ttl_s < 1:
        raise UsageError(f"gateway.ttl_s ({found.origin}) is at least 1 second, not {ttl_s}")
    return ttl_s


def _limits(config: Config) -> dict[str, Any]:
    """The limits of the gateway; seconds become milliseconds."""
    names = "streams_per_key depth_per_key rate_burst body_bytes_max form_bytes_max head_bytes_max"
    names += " idle_timeout_s connections_max connections_per_address failed_logins_per_min"
    limits: dict[str, Any] = {name: config.integer(f"gateway.{name}") for name in names.split()}
    limits["rate_per_s"] = config.number("gateway.rate_per_s")
    for name in ("heartbeat", "body_timeout", "head_timeout", "session", "session_idle"):
        limits[f"{name}_ms"] = round(config.number(f"gateway.{name}_s") * 1000)
    limits["drain_ms"] = round(config.number("gateway.drain_timeout_s") * 1000)
    return limits


def _first_line(path: str) -> str:
    try:
        return read_secret_file(path).split("\n", 1)[0].strip()
    except OSError as error:
        raise UsageError(f"--worker-key-file {path}: {error.strerror}") from None


def _route_options(config: Config) -> dict[str, Any]:
    """What routes that take credentials need to seal them and to check addresses and secrets."""
    from tenure.cli.keys import open_seal
    from tenure.egress import Guard, Policy
    from tenure.webhooks.signing import read_secrets

    guard = Guard(Policy(allow=tuple(config.texts("egress.allow"))))
    signed = read_secrets(config.text("webhooks.secrets"))
    return {
        "seal": open_seal(config),
        "check_url": guard.check_url,
        "has_secret": signed.has,
        "files": bool(config.text("transcode.files")),
    }


@click.command("receiver")
@click.option("--port", type=click.IntRange(0, 65_535), default=8471, help="On loopback (8471).")
@click.option("--requester", default="*", help="Whose secrets of webhooks.secrets to verify with.")
def receiver_command(port: int, requester: str) -> None:
    """Receive webhooks on http://127.0.0.1:PORT/hooks, verify them, and show the last ones.

    The secrets are those of TENURE_WEBHOOKS_SECRETS. Without any, a secret is made and printed.
    The sender must be allowed to reach loopback: TENURE_EGRESS_ALLOW=127.0.0.1:8471.

    \b
    tenure receiver --port 8471
    """
    try:
        import uvicorn
    except ImportError:
        raise UsageError("the receiver needs a web server: pip install 'tenure[inbox]'") from None
    from tenure.webhooks.receiver import ReceiverPage

    app = _local_only(ReceiverPage(_secrets(requester)))
    note(f"receiving on http://127.0.0.1:{port}/hooks, shown on http://127.0.0.1:{port}/")
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", lifespan="off")


def _local_only(page: Any) -> Any:
    """Serve the page only under a name of this machine, against DNS rebinding."""
    from tenure.gateway.settings import is_local_host

    async def app(scope: Any, receive: Any, send: Any) -> None:
        hosts = [text.decode("latin-1") for name, text in scope["headers"] if name == b"host"]
        if len(hosts) == 1 and is_local_host(hosts[0]):
            await page(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 421, "headers": []})
            await send({"type": "http.response.body", "body": b"use http://127.0.0.1\n"})

    return app


def _secrets(requester: str) -> list[bytes]:
    from tenure.webhooks import new_secret, read_secret
    from tenure.webhooks.signing import read_secrets

    known = read_secrets(load_config().text("webhooks.secrets"))
    live = asyncio.run(known.live(requester))
    if live:
        return [one.reveal() for one in live]
    secret = new_secret()
    emit_text(secret)
    note("no secret is set; this one was made for now")
    return [read_secret(secret)]
