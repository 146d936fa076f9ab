"""A receiver of webhooks on loopback that checks what it gets, answers at once, and keeps count.

`python receiver.py FOLDER KEY` writes its port to FOLDER/port. A delivery counts as signed when its
signature is that of its own timestamp, nonce and body under KEY (base64), the timestamp is of now,
the nonce was never seen, and the event id in the header is that of the body; the check is written
out here, apart from the code that signs. At the first delivery FOLDER/first appears; whenever a
tenth of a second has passed without one, FOLDER/told says how many came, how many of them were
unsigned, came a second time, or after a later one of their job, and when the first and the last
came (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import httptools
import uvloop

ANSWER = b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n"
SKEW_S = 300


class Tally:
    """What came so far."""

    def __init__(self, key: bytes, begun: Callable[[], None]) -> None:
        self.count = self.late = self.twice = self.unsigned = self.first_ns = self.last_ns = 0
        self._key = key
        self._begun = begun
        self._nonces: set[bytes] = set()
        self._events: set[str] = set()
        self._seen: dict[str, int] = {}

    def take(self, headers: Mapping[bytes, bytes], body: bytes) -> None:
        """One delivery."""
        self.last_ns = time.monotonic_ns()
        if not self.count:
            self.first_ns = self.last_ns
            self._begun()
        self.count += 1
        event = json.loads(body)
        self.unsigned += not self._is_signed(headers, body, event["event_id"])
        self.twice += event["event_id"] in self._events
        self._events.add(event["event_id"])
        self.late += event["seq"] < self._seen.get(event["job_id"], 0)
        self._seen[event["job_id"]] = event["seq"]

    def _is_signed(self, headers: Mapping[bytes, bytes], body: bytes, event_id: str) -> bool:
        stamp, nonce = headers[b"x-euterpe-timestamp"], headers[b"x-euterpe-nonce"]
        wanted = hmac.digest(self._key, b"%b.%b.%b" % (stamp, nonce, body), hashlib.sha256).hex()
        is_new = nonce not in self._nonces
        self._nonces.add(nonce)
        return (
            hmac.compare_digest(wanted.encode(), headers[b"x-euterpe-signature"])
            and abs(time.time() - int(stamp)) < SKEW_S
            and is_new
            and headers[b"x-euterpe-event-id"] == event_id.encode()
        )


class Connection(asyncio.Protocol):
    """One connection of the sender, request after request."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._tally.take(self._headers, b"".join(self._body))
        self._body, self._headers = [], {}
        self._transport.write(ANSWER)


async def serve(folder: Path, key: bytes) -> None:
    """Until ended."""
    tally = Tally(key, (folder / "first").touch)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(tally), "127.0.0.1")
    draft, told = folder / "draft", 0
    draft.write_text(str(server.sockets[0].getsockname()[1]))
    draft.rename(folder / "port")
    while True:
        before = tally.count
        await asyncio.sleep(0.1)
        if before == tally.count != told:
            figures = ("count", "late", "twice", "unsigned", "first_ns", "last_ns")
            draft.write_text(json.dumps({name: getattr(tally, name) for name in figures}))
            draft.rename(folder / "told")
            told = tally.count


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), base64.b64decode(sys.argv[2])))
