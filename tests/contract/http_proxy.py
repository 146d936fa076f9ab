"""A proxy between a worker and a plane that passes requests on and can lose an answer.

The request is executed: its answer is read to the end, and then the client's connection is cut
instead of being given it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from urllib.parse import urlsplit


class HttpProxy:
    """One listening address before a plane. `dropped` counts the answers that were lost."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loses: Callable[[bytes], bool] | None = None
        self._cut = False
        self.dropped = 0

    @property
    def url(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def start(self) -> HttpProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop_reply(self, path: str = "") -> None:
        """Lose the answer to the next request, or to the next one of a path."""
        self._loses = lambda request: path.encode() in request.split(b"\r\n", 1)[0]

    def cut(self, *, cut: bool) -> None:
        """Cut the network: nothing passes, and nobody is told; False mends it."""
        self._cut = cut

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there: asyncio.StreamWriter | None = None
        requests: asyncio.Queue[bytes] = asyncio.Queue()
        asking: asyncio.Task[None] | None = None
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            back, there = await asyncio.open_connection(self._host, self._port)
            asking = asyncio.create_task(self._ask(reader, there, requests))
            while True:
                answer, request = await read_message(back), await requests.get()
                await self._mended()
                if self._loses is not None and self._loses(request):
                    self._loses = None
                    self.dropped += 1
                    break
                writer.write(answer)
                await writer.drain()
        if asking is not None:
            asking.cancel()
        for each in (writer, there):
            if each is not None:
                each.transport.abort()

    async def _ask(
        self,
        reader: asyncio.StreamReader,
        there: asyncio.StreamWriter,
        requests: asyncio.Queue[bytes],
    ) -> None:
        """Pass requests on until the client hangs up, which the plane is then told."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                request = await read_message(reader)
                await self._mended()
                requests.put_nowait(request)
                there.write(request)
        await self._mended()
        there.transport.abort()

    async def _mended(self) -> None:
        while self._cut:
            await asyncio.sleep(0.02)  # mended by the test


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """A request or an answer with a Content-Length, head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    return head + (await reader.readexactly(length) if length else b"")
