"""A receiver of webhooks on loopback that answers at once, and keeps count and order.

`python receiver.py FOLDER` writes its port to FOLDER/port, and what it got to FOLDER/told whenever
a tenth of a second has passed without a delivery: how many, how many of them came after a later one
of their job, and when the first and the last came (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import cast

import httptools
import uvloop

ANSWER = b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n"


class Tally:
    """What came so far."""

    def __init__(self) -> None:
        self.count = self.late = self.first_ns = self.last_ns = 0
        self.unsigned = 0
        self._seen: dict[str, int] = {}

    def take(self, body: bytes, *, signed: bool) -> None:
        """One delivery."""
        self.last_ns = time.monotonic_ns()
        self.first_ns = self.first_ns or self.last_ns
        self.count += 1
        self.unsigned += not signed
        event = json.loads(body)
        job_id, number = event["job_id"], event["seq"]
        self.late += number < self._seen.get(job_id, 0)
        self._seen[job_id] = number


class Connection(asyncio.Protocol):
    """One connection of the sender, request after request."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._signed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._signed |= b"signature" in name.lower()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._tally.take(b"".join(self._body), signed=self._signed)
        self._body, self._signed = [], False
        self._transport.write(ANSWER)


async def serve(folder: Path) -> None:
    """Until ended."""
    tally = Tally()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(tally), "127.0.0.1")
    draft, told = folder / "draft", 0
    draft.write_text(str(server.sockets[0].getsockname()[1]))
    draft.rename(folder / "port")
    while True:
        before = tally.count
        await asyncio.sleep(0.1)
        if before == tally.count != told:
            figures = ("count", "late", "unsigned", "first_ns", "last_ns")
            draft.write_text(json.dumps({name: getattr(tally, name) for name in figures}))
            draft.rename(folder / "told")
            told = tally.count


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
