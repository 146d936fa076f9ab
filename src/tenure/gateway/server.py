"""Runs a gateway with uvicorn: sockets, signals, systemd notification, graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from tenure.core.errors import UsageError
from tenure.gateway.application import Gateway
from tenure.gateway.http.connections import ClientConnection, Connections
from tenure.gateway.keys import Keys
from tenure.gateway.settings import GatewaySettings, split_address
from tenure.worker.events import Notifier

_log = structlog.get_logger("tenure.gateway")

_BACKLOG = 4096
# uvloop accepts one connection per socket in each loop iteration. With copies of the socket, new
# clients do not wait behind a flood of connections.
_ACCEPTS = 8
_OTHER_FILES = 256  # open files besides client connections: stores, logs, libraries


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers; also closes connections past their deadline."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    async def on_tick(self, counter: int) -> bool:
        self._connections.sweep()  # every 0.1 s
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(
    settings: GatewaySettings, *, ring: Keys | None = None
) -> AsyncIterator[RunningGateway]:
    """Run a gateway in the current event loop for the length of the block; port 0 is any port."""
    gateway = Gateway(settings, ring=ring)
    await gateway.check_safe()
    logging.getLogger("uvicorn.error").addFilter(_log_filter)
    connections = Connections(settings, _connections_max(settings.connections_max))
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(_bound_socket(settings.host, settings.port, settings.unix_socket))
        ]
        if settings.admin_address:
            admin = split_address(settings.admin_address)
            sockets.append(stack.enter_context(_bound_socket(*admin)))
            connections.admin_port = sockets[1].getsockname()[1]
        config = uvicorn.Config(
            gateway.asgi,
            http=partial(ClientConnection, connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=settings.idle_timeout_s,
            timeout_graceful_shutdown=max(1, settings.drain_ms // 1000),
        )
        server = _Server(config, connections)
        copies = [sock.dup() for sock in sockets for _ in range(_ACCEPTS - 1)]
        task = asyncio.create_task(server.serve(sockets=sockets + copies))
        running = RunningGateway(gateway, server, *map(_address, sockets))
        try:
            await _wait_started(server, task)
            yield running
        finally:
            await running.stop()
            await task


class RunningGateway:
    """A gateway that accepts requests at `url` (`unix:` and the path for a unix socket).

    `admin_url` is the address for administrators. It equals `url` unless `admin_address` is set.
    """

    def __init__(
        self, gateway: Gateway, server: uvicorn.Server, url: str, admin_url: str = ""
    ) -> None:
        self.gateway = gateway
        self.url = url
        self.admin_url = admin_url or url
        self._server = server

    async def stop(self) -> None:
        """Drain, then stop accepting connections; returns before the last responses are sent."""
        self.gateway.drain()
        await asyncio.sleep(0)
        self._server.should_exit = True

    def stop_now(self) -> None:
        """Stop without waiting for requests that run."""
        self._server.force_exit = True
        self._server.should_exit = True


def _log_filter(record: logging.LogRecord) -> bool:
    """Drop uvicorn's messages that we log ourselves, or that only report a shutdown.

    For requests that are not HTTP we log `bad_request`, which is rate limited. Requests cancelled
    at shutdown are logged as one line with their number.
    """
    text = str(record.msg)
    if text == "Invalid HTTP request received.":
        return False
    cancelled = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    if cancelled or text.rstrip().endswith("asyncio.exceptions.CancelledError"):
        return False
    if text.startswith("Cancel %s running task(s)") and isinstance(record.args, tuple):
        _log.warning("gateway_cut_off", requests=record.args[0])
        return False
    return True


async def serve(
    settings: GatewaySettings, *, notify_socket: str = "", watchdog_ms: int = 0
) -> None:
    """Serve until SIGTERM or SIGINT; a second signal stops at once."""
    notifier = Notifier(notify_socket)
    stop = asyncio.Event()
    async with serving(settings) as running:
        _on_signals(running, stop)
        _log.info(
            "gateway_ready",
            url=running.url,
            queues=len(settings.queues),
            **({"admin_url": running.admin_url} if settings.admin_address else {}),
        )
        notifier.ready(f"serving on {running.url}")
        watchdog = asyncio.create_task(notifier.feed_watchdog(watchdog_ms))
        await stop.wait()
        notifier.stopping()
        _log.info("gateway_draining", clients=running.gateway.streams)
    watchdog.cancel()
    _log.info("gateway_stopped")


def run(settings: GatewaySettings, *, notify_socket: str = "", watchdog_ms: int = 0) -> None:
    """Serve in a new event loop; `notify_socket` and `watchdog_ms` are what systemd gave us."""
    run_loop(serve(settings, notify_socket=notify_socket, watchdog_ms=watchdog_ms))


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop, on Windows on asyncio."""
    # Objects that exist now live as long as the process. Freezing them, so that the garbage
    # collector skips them, saves a sixth of the time of a request.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


def _on_signals(running: RunningGateway, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            running.stop_now()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


async def _wait_started(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    while not server.started:
        if task.done():
            await task
            raise UsageError("the gateway could not start; the log says why")
        await asyncio.sleep(0.01)


def _connections_max(wanted: int) -> int:
    """The number of connections that the limit of open files permits; raises that limit if it can.

    A process without a free file descriptor resets every new connection.
    """
    if sys.platform == "win32":
        return wanted
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    possible = max(soft - _OTHER_FILES, soft // 2)
    _log.warning("gateway_few_open_files", open_files=soft, connections_max=possible)
    return possible


@contextmanager
def _bound_socket(host: str, port: int, path: str = "") -> Iterator[socket.socket]:
    """A listening socket; an address in use is a `UsageError`, so that no traceback is shown."""
    try:
        sock = _unix_socket(path) if path else _tcp_socket(host, port)
    except OSError as error:
        where = path or f"{host}:{port}"
        raise UsageError(f"the gateway cannot listen on {where}: {error.strerror}") from None
    try:
        yield sock
    finally:
        sock.close()
        if path:
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()


def _tcp_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _unix_socket(path: str) -> socket.socket:
    """Replaces a stale socket file, but not one on which a process listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(path)
        except OSError:
            if not Path(path).is_socket() or _answers(path):
                raise
            Path(path).unlink()
            sock.bind(path)
        Path(path).chmod(0o660)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def _address(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
