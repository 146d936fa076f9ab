"""The commands that serve until they are stopped: worker, gateway and receiver.

Heavy modules are imported in functions, so that `--help` and wrong options answer fast.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tenure.cli.config import (
    Config,
    as_list,
    child_environment,
    colours_wanted,
    load_config,
    notify_address,
    process_environment,
    with_options,
)
from tenure.cli.console import emit_text, note, note_child_line, queues_option
from tenure.core.config import DEFAULT_CONTRACT, read_secret_file
from tenure.core.errors import UsageError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from tenure.gateway.settings import GatewaySettings
    from tenure.worker import Worker
    from tenure.worker.events import Notifier

_PROBES_MAX = 32
_LEVELS = ("debug", "info", "warning", "error")
_FORMATS = ("auto", "json", "text")


def set_up_logs(config: Config, level: str | None = None, *, app: bool = False) -> str:
    """Send structlog and the standard library's logging to stderr; returns the level's name.

    With `app` the application is still to be imported and may set up logging: then only our own
    lines are shown until `worker.telemetry.ensure_logs` sees whether it has.
    """
    from tenure.worker.telemetry import configure_logs

    name, style = config.text("log_level", level).lower(), config.text("log_format")
    if name not in _LEVELS:
        raise UsageError(f"log_level is {name!r}; it is one of {', '.join(_LEVELS)}")
    if style not in _FORMATS:
        raise UsageError(f"log_format is {style!r}; it is one of {', '.join(_FORMATS)}")
    configure_logs(
        level=name,
        json=None if style == "auto" else style == "json",
        stream=sys.stderr,
        colours=colours_wanted(sys.stderr),
        others=name if app else "",
        early=app,
    )
    return name


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
@queues_option
@click.option("--concurrency", type=click.IntRange(min=1), help="Concurrent attempts.")
@click.option("--processes", type=click.IntRange(min=1), help="Worker processes (1).")
@click.option("--burst", is_flag=True, help="Stop when the queues are empty.")
@click.option("--drain-timeout", "drain_timeout_s", type=click.FloatRange(min=0), help="Seconds.")
@click.option("--metrics-host", help="The address for metrics and health (127.0.0.1).")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="/metrics, /livez, /readyz.")
@click.option("--lease-ms", type=click.IntRange(min=1), help="How long a lease lasts.")
@click.option("--lifespan", metavar="MODULE:NAME", help="What is open while the worker runs.")
@click.option("--middleware", metavar="MODULE:NAME", multiple=True, help="Repeatable.")
@click.option("--log-level", help="debug, info, warning or error.")
@click.option("--samples", is_flag=True, help="With tenure.tasks: samples where there is no model.")
@click.option("--reload", is_flag=True, help="Start again when a Python file changes.")
@click.option("--only-load", is_flag=True, hidden=True)
def worker_command(targets: tuple[str, ...], queue_urls: tuple[str, ...], **flags: Any) -> int:
    """Run the @task functions of files (app.py) or modules.

    `tenure.tasks` are the built-in ones, `tenure.transcode` those of an inbox.

    The first SIGTERM or Ctrl-C lets running jobs finish, the second hands them back at once.

    \b
    tenure worker app.py
    tenure worker app.py --queue 'bullmq+redis://127.0.0.1:6379/0?queue=mail' --concurrency 50
    tenure worker app.py --burst
    tenure worker app.py --reload
    """
    config = load_config()
    if flags["only_load"]:
        from tenure.cli.handlers import load_all

        load_all(targets, config)
        return 0
    if flags["reload"]:
        return _run_reloading(targets, queue_urls, flags)
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
        load_named,
        with_share,
        with_slots,
    )
    from tenure.worker import Settings, Worker, identity
    from tenure.worker.telemetry import ensure_logs

    level = set_up_logs(config, flags["log_level"], app=True)
    concurrency = config.integer("worker.concurrency", flags["concurrency"])
    tasks = load_all(targets, config, samples=flags["samples"], urls=urls, concurrency=concurrency)
    ensure_logs()
    lifespan = load_named(flags["lifespan"], "--lifespan") if flags["lifespan"] else None
    middleware = [load_named(each, "--middleware") for each in flags["middleware"]]
    if targets[0] == INBOX:
        per_key, slots = config.integer("transcode.per_key"), concurrency or TRANSCODES
        urls = [with_share(url, slots, per_key) for url in urls]
        urls = urls if concurrency else [with_slots(url) for url in urls]
    notify_socket, watchdog_ms = notify_address()
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
        notify_socket=notify_socket,
        watchdog_ms=watchdog_ms,
    )
    worker = Worker(tasks, queues=urls, lifespan=lifespan, middleware=middleware, settings=settings)
    port = config.integer("worker.metrics_port", flags["metrics_port"])
    if port:
        _serve_metrics(config.text("worker.metrics_host", flags["metrics_host"]), port, worker)
    return worker.run()


def _serve_metrics(host: str, port: int, worker: Worker) -> None:
    """Serve /metrics, /livez and /readyz from threads of their own."""
    from wsgiref.simple_server import WSGIRequestHandler

    from prometheus_client.exposition import ThreadingWSGIServer

    class Server(ThreadingWSGIServer):
        """Each connection has a thread and a file, so only so many are open: a further one ends
        the one that is open longest, and a probe is answered whoever else is connected."""

        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        request_queue_size = 128  # five by default, which lets in six connections a second
        lock = threading.Lock()
        opened: dict[Any, None] = {}  # noqa: RUF012 - there is one server

        def process_request(self, request: Any, client_address: Any) -> None:
            with self.lock:
                if len(self.opened) >= _PROBES_MAX:
                    longest = next(iter(self.opened))
                    del self.opened[longest]
                    with suppress(OSError):
                        longest.shutdown(socket.SHUT_RDWR)
                self.opened[request] = None
            super().process_request(request, client_address)

        def shutdown_request(self, request: Any) -> None:
            with self.lock:
                self.opened.pop(request, None)
            super().shutdown_request(request)

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A connection that breaks is not worth a line either."""

    class Silent(WSGIRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """A probe every second is not worth a line."""

    try:
        server = Server((host, port), Silent)
    except OSError as error:
        raise UsageError(
            f"metrics cannot be served on {host} port {port} ({error.strerror}); choose a free "
            "one with --metrics-host and --metrics-port"
        ) from None
    server.set_app(_metrics_app(worker))
    threading.Thread(target=server.serve_forever, name="tenure-metrics", daemon=True).start()


def _metrics_app(worker: Worker) -> Any:
    """A WSGI application. Health is answered with 200 or 503, and what the worker knows of itself.

    A worker is live while its event loop and its keeper run, and ready while it takes jobs from at
    least one store.
    """
    import msgspec
    from prometheus_client import make_wsgi_app

    metrics = make_wsgi_app(worker.registry)
    checks = {"/livez": worker.is_live, "/readyz": worker.is_ready}

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)
        if path not in checks:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"there are /metrics, /livez and /readyz\n"]
        status = "200 OK" if checks[path]() else "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json")])
        return [msgspec.json.encode(worker.health())]

    return app


_RELOAD_DRAIN_S = 2.0


def _run_reloading(
    targets: Sequence[str], queue_urls: Sequence[str], flags: Mapping[str, Any]
) -> int:
    """Run the same command as a child, again after every change; a broken one waits for the next.

    Running jobs have two seconds to finish, unless --drain-timeout says otherwise.
    """
    try:
        from watchfiles import PythonFilter, run_process
    except ModuleNotFoundError:
        raise UsageError("--reload needs watchfiles: pip install 'tenure[reload]'") from None
    from tenure.core.process import bound_to_parent

    drain_s = _RELOAD_DRAIN_S if flags["drain_timeout_s"] is None else flags["drain_timeout_s"]
    given = {**flags, "reload": False, "drain_timeout_s": None}
    command = [*_worker_command(targets, given), "--drain-timeout", str(drain_s)]
    for url in queue_urls:
        command += ["--queue", url]
    folders = {Path(each).resolve().parent if each.endswith(".py") else Path() for each in targets}

    def changed(changes: set[Any]) -> None:
        names = sorted({Path(path).name for _, path in changes})
        note(f"{', '.join(names)} changed: starting the worker again")

    run_process(
        *folders,
        target=shlex.join(bound_to_parent(command, dies_by=signal.SIGTERM)),
        target_type="command",
        watch_filter=PythonFilter(),
        callback=changed,
        sigint_timeout=round(drain_s) + 8,
    )
    return 0


def _worker_command(targets: Sequence[str], flags: Mapping[str, Any]) -> list[str]:
    """`tenure worker` with the flags that were given, for a child."""
    command = [sys.executable, "-P", "-m", "tenure.cli", "worker", *targets]
    for name, value in flags.items():
        option = f"--{name.removesuffix('_s').replace('_', '-')}"
        for each in value if isinstance(value, tuple) else [value]:
            if each is True:
                command.append(option)
            elif each is not None and each is not False:
                command += [option, str(each)]
    return command


def _run_many(
    targets: Sequence[str], urls: list[str], config: Config, flags: dict[str, Any]
) -> int:
    count = config.integer("worker.processes", flags["processes"])
    drain_s = config.number("worker.drain_timeout_s", flags["drain_timeout_s"])
    port = config.integer("worker.metrics_port", flags["metrics_port"])
    # The lease time is in the URLs already, which are not in argv: they may contain a password.
    given = {**flags, "processes": 1, "lease_ms": None}
    commands = [
        _worker_command(targets, {**given, "metrics_port": port + n if port else None})
        for n in range(count)
    ]
    queues = {"TENURE_WORKER_QUEUES": as_list(urls)}
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
@queues_option
@click.option(
    "--redis", "redis_url", metavar="URL", help=f"Short for --queue {DEFAULT_CONTRACT}+URL."
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
    tenure gateway --queue streams+redis://127.0.0.1:6379/0
    tenure gateway --host 0.0.0.0 -q 'inbox+sqlite:///jobs.db' -q 'plane+sqlite:///jobs.db'
    """
    config = load_config()
    urls = [*queue_urls, *([f"{DEFAULT_CONTRACT}+{redis_url}"] if redis_url else [])]
    try:
        from tenure.gateway.server import run
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}; install the gateway: pip install 'tenure[gateway]'") from None

    set_up_logs(config, log_level)
    settings = gateway_settings(
        config,
        queues=tuple(urls),
        host=config.text("gateway.host", host),
        port=config.integer("gateway.port", port),
        admin_address=config.text("gateway.admin_address", admin_address),
        anonymous=not require_key,
        worker_key=_first_line(worker_key_file) if worker_key_file else "",
        trusted_proxies=tuple(config.texts("gateway.trusted_proxies", trusted_proxies)),
        sso_groups=tuple(config.texts("gateway.sso_groups", sso_groups)),
    )
    address, watchdog_ms = notify_address()
    # A thread that parses a large body must yield to the event loop soon.
    sys.setswitchinterval(0.001)
    run(settings, notify_socket=address, watchdog_ms=watchdog_ms)


def gateway_settings(
    config: Config, *, queues: tuple[str, ...] = (), **given: Any
) -> GatewaySettings:
    """The settings of a gateway; `queues` and `given` win over the configuration."""
    from tenure.core.registry import has_part
    from tenure.gateway.settings import GatewaySettings

    urls = tuple(config.texts("gateway.queues", queues) or [config.text("queue_url")])
    credentials = any(has_part(url, "credentials") for url in urls)
    configured: dict[str, Any] = {
        "host": config.text("gateway.host"),
        "port": config.integer("gateway.port"),
        "ttl_s": _ttl_s(config),
        "route_options": _route_options(config) if credentials else {},
        "redact": tuple(config.texts("gateway.redact")),
        "audit_keep": config.integer("gateway.audit_keep"),
        "trace_url": config.text("gateway.trace_url"),
        "lake": config.text("gateway.lake"),
        "trusted_proxies": tuple(config.texts("gateway.trusted_proxies")),
        "sso_groups": tuple(config.texts("gateway.sso_groups")),
        "sso_user_header": config.text("gateway.sso_user_header"),
        "sso_groups_header": config.text("gateway.sso_groups_header"),
        **_limits(config),
    }
    return GatewaySettings(queues=urls, **configured | given)


def gateway_app() -> FastAPI:
    """The application `tenure.gateway:app`."""
    from tenure.gateway.application import create_app

    return create_app(gateway_settings(load_config()))


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
