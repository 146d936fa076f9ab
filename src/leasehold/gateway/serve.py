"""Running a gateway: uvicorn with uvloop and httptools, and an orderly end.

On the first SIGTERM or SIGINT /readyz turns to 503, followers are told to reconnect, requests in
flight are answered, and the process ends; a second signal ends it at once.
"""

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
from pathlib import Path
from typing import Any, cast

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from leasehold.core.errors import UsageError
from leasehold.gateway.app import Gateway
from leasehold.gateway.keys import Keys
from leasehold.gateway.notify import Notifier
from leasehold.gateway.problems import MEDIA, Problem
from leasehold.gateway.settings import GatewaySettings
from leasehold.gateway.sse import ABORT

_log = structlog.get_logger("leasehold.gateway")

_BACKLOG = 4096
_KEEP_ALIVE_S = 20


class _Protocol(HttpToolsProtocol):
    """Lets the application cut off a client that does not read: closing would wait for it.

    Head and body of an answer leave in one write: a write is the dearest part of a small answer.
    """

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":
            self.cycle.transport = cast("asyncio.Transport", Joined(self.transport))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
        extensions[ABORT] = self.transport.abort

    def send_400_response(self, msg: str) -> None:
        """What is not even HTTP gets a problem document as well."""
        body = Problem("bad_http", msg).body("", "")
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: {MEDIA.decode()}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class Joined:
    """A connection on which the head of an answer whose body has a length waits for that body."""

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and b"\r\ncontent-length: " in data:
            self._head = data
            return
        self._transport.write(data)

    def close(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class _Server(uvicorn.Server):
    """A server that leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(settings: GatewaySettings, *, ring: Keys | None = None) -> AsyncIterator[Running]:
    """A gateway that serves within the block, in the running loop; port 0 finds a free one."""
    gateway = Gateway(settings, ring=ring)
    await gateway.check_safe()
    with _listening(settings) as sock:
        config = uvicorn.Config(
            gateway,
            http=_Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, settings.drain_ms // 1000),
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        running = Running(gateway, server, _address(settings, sock))
        try:
            await _started(server, task)
            yield running
        finally:
            await running.stop()
            await task


class Running:
    """A gateway that serves; `url` is where (the path of the socket for a unix socket)."""

    def __init__(self, gateway: Gateway, server: uvicorn.Server, url: str) -> None:
        self.gateway = gateway
        self.url = url
        self._server = server

    async def stop(self) -> None:
        """Drain, then stop taking connections; returns before the last answers are out."""
        self.gateway.drain()
        await asyncio.sleep(0)
        self._server.should_exit = True

    def stop_now(self) -> None:
        """Stop without waiting for anybody."""
        self._server.force_exit = True
        self._server.should_exit = True


def _without_cut_off(record: logging.LogRecord) -> bool:
    """Whether uvicorn's line stays: a request cut off by the end of the process is no error."""
    said = str(record.msg)
    cut_off = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    if cut_off or said.rstrip().endswith("asyncio.exceptions.CancelledError"):
        return False
    if said.startswith("Cancel %s running task(s)") and isinstance(record.args, tuple):
        _log.warning("gateway_cut_off", requests=record.args[0])
        return False
    return True


async def serve(settings: GatewaySettings, notifier: Notifier | None = None) -> None:
    """Serve until a signal says stop."""
    notifier = notifier or Notifier()
    logging.getLogger("uvicorn.error").addFilter(_without_cut_off)
    stop = asyncio.Event()
    async with serving(settings) as running:
        _on_signals(running, stop)
        _log.info("gateway_ready", url=running.url, queues=len(settings.queues))
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
    # What is alive now stays: not walking it again and again saves a sixth of a request's time.
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

    def asked() -> None:
        if stop.is_set():
            running.stop_now()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)


async def _started(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    while not server.started:
        if task.done():
            await task
            raise UsageError("the gateway could not start; the log says why")
        await asyncio.sleep(0.01)


@contextmanager
def _listening(settings: GatewaySettings) -> Iterator[socket.socket]:
    """The bound socket; an address that is taken is a plain message, not a stack."""
    path = settings.unix_socket
    try:
        sock = _unix(path) if path else _tcp(settings.host, settings.port)
    except OSError as error:
        where = path or f"{settings.host}:{settings.port}"
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
    """A stale socket file is replaced; one that somebody answers on is not."""
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


def _address(settings: GatewaySettings, sock: socket.socket) -> str:
    if settings.unix_socket:
        return f"unix:{settings.unix_socket}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
