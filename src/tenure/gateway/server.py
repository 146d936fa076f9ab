"""Runs a gateway with uvicorn: sockets, signals, systemd, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from tenure.core.errors import UsageError
from tenure.gateway.app import Gateway
from tenure.gateway.connections import Connection, Connections
from tenure.gateway.keys import Keys
from tenure.gateway.settings import GatewaySettings, split_address
from tenure.worker.events import Notifier as Datagrams

_log = structlog.get_logger("tenure.gateway")

_BACKLOG = 4096
_ACCEPTS = 8  # uvloop accepts one connection a turn from a socket: newcomers waited behind a flood
_OTHER_FILES = 256  # open files besides connections of clients: stores, logs, libraries
_SWEEP_TICKS = 3  # deadlines of connections are checked every third tick of 0.1 s


class _Server(uvicorn.Server):
    """A server without signal handlers, which ends connections past their deadline."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._swept = connections

    async def on_tick(self, counter: int) -> bool:
        if counter % _SWEEP_TICKS == 0:
            self._swept.sweep()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(settings: GatewaySettings, *, ring: Keys | None = None) -> AsyncIterator[Running]:
    """A gateway that serves within the block, in the running loop; port 0 finds a free one."""
    gateway = Gateway(settings, ring=ring)
    await gateway.check_safe()
    logging.getLogger("uvicorn.error").addFilter(_log_filter)
    connections = Connections(settings, _fitting(settings.connections_max))
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(_listening(settings.host, settings.port, settings.unix_socket))
        ]
        if settings.admin_address:
            sockets.append(stack.enter_context(_listening(*split_address(settings.admin_address))))
            connections.admin_port = sockets[1].getsockname()[1]
        config = uvicorn.Config(
            gateway,
            http=partial(Connection, connections),  # type: ignore[arg-type]
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
        running = Running(gateway, server, *map(_address, sockets))
        try:
            await _started(server, task)
            yield running
        finally:
            await running.stop()
            await task


class Running:
    """A gateway that serves; `url` is where (the path of the socket for a unix socket).

    `admin_url` is where it answers administrators: the same, unless they have their own address.
    """

    def __init__(
        self, gateway: Gateway, server: uvicorn.Server, url: str, admin_url: str = ""
    ) -> None:
        self.gateway = gateway
        self.url = url
        self.admin_url = admin_url or url
        self._server = server

    async def stop(self) -> None:
        """Drain, then stop taking connections; returns before the last answers are out."""
        self.gateway.drain()
        await asyncio.sleep(0)
        self._server.should_exit = True

    def stop_now(self) -> None:
        """Stop without waiting for requests."""
        self._server.force_exit = True
        self._server.should_exit = True


def _log_filter(record: logging.LogRecord) -> bool:
    """Keep a line of uvicorn, unless it is about requests cut off at the end of the process.

    Requests that are no HTTP have our own line `bad_request`, which is rate limited.
    """
    text = str(record.msg)
    if text == "Invalid HTTP request received.":
        return False
    cut_off = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    if cut_off or text.rstrip().endswith("asyncio.exceptions.CancelledError"):
        return False
    if text.startswith("Cancel %s running task(s)") and isinstance(record.args, tuple):
        _log.warning("gateway_cut_off", requests=record.args[0])
        return False
    return True


async def serve(settings: GatewaySettings, notifier: Notifier | None = None) -> None:
    """Serve until a signal says stop."""
    notifier = notifier or Notifier()
    stop = asyncio.Event()
    async with serving(settings) as running:
        _on_signals(running, stop)
        _log.info(
            "gateway_ready",
            url=running.url,
            queues=len(settings.queues),
            **({"admin_url": running.admin_url} if settings.admin_address else {}),
        )
        notifier.say(f"READY=1\nSTATUS=serving on {running.url}")
        watchdog = asyncio.create_task(notifier.keep_alive())
        await stop.wait()
        notifier.say("STOPPING=1\nSTATUS=draining")
        _log.info("gateway_draining", clients=sum(s.feed.clients for s in running.gateway.served))
    watchdog.cancel()
    _log.info("gateway_stopped")


def run(settings: GatewaySettings, notifier: Notifier | None = None) -> None:
    """Serve in an event loop of its own."""
    run_loop(serve(settings, notifier))


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop where there is one."""
    # Objects that exist now live for ever: leaving them out of collections saves a sixth of the
    # time of a request.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


def _on_signals(running: Running, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            running.stop_now()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


async def _started(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    while not server.started:
        if task.done():
            await task
            raise UsageError("the gateway could not start; the log says why")
        await asyncio.sleep(0.01)


def _fitting(connections_max: int) -> int:
    """How many connections the limit of open files permits; it is raised where that is possible.

    A process without a free file descriptor resets every new connection.
    """
    if sys.platform == "win32":
        return connections_max
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections_max
    fitting = max(soft - _OTHER_FILES, soft // 2)
    _log.warning("gateway_few_open_files", open_files=soft, connections_max=fitting)
    return fitting


@contextmanager
def _listening(host: str, port: int, path: str = "") -> Iterator[socket.socket]:
    """The bound socket; an address that is taken is a plain message, not a stack."""
    try:
        sock = _unix(path) if path else _tcp(host, port)
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


def _tcp(host: str, port: int) -> socket.socket:
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


def _unix(path: str) -> socket.socket:
    """A stale socket file is replaced; one that a process listens on is not."""
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


class Notifier:
    """Tells systemd that the gateway is ready, alive or stopping; silent without systemd."""

    def __init__(self, address: str = "", watchdog_ms: int = 0) -> None:
        self._datagrams = Datagrams(address)
        self._watchdog_ms = watchdog_ms if address else 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Notifier:
        """From the variables that systemd sets for Type=notify and WatchdogSec=."""
        usec = environment.get("WATCHDOG_USEC", "")
        watchdog_ms = int(usec) // 2000 if usec.isdigit() else 0
        return cls(environment.get("NOTIFY_SOCKET", ""), watchdog_ms)

    def say(self, message: str) -> None:
        """Send one message; a supervisor that does not listen is no reason to fail."""
        self._datagrams.send(message)

    async def keep_alive(self) -> None:
        """Feed the watchdog from the event loop, so that systemd restarts one that hangs."""
        while self._watchdog_ms:
            self._datagrams.watchdog()
            await asyncio.sleep(self._watchdog_ms / 1000)
