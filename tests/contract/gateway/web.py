"""A bare HTTP/1.1 client: what goes over the wire is exactly what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Reply:
    """An answer; header names are lower-case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class SseEvent:
    """One event, or one comment (`name` is then ":")."""

    name: str = ""
    id: str = ""
    data: str = ""
    retry: int | None = None

    @property
    def json(self) -> Any:
        return json.loads(self.data)


@dataclass
class Web:
    """A client of one gateway. `headers` go with every request."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """One request on a connection of its own."""
        reader, writer = await self.connect()
        try:
            writer.write(self.head(method, path, body, headers) + (body or b""))
            return await read_reply(reader, head_only=method == "HEAD")
        finally:
            writer.close()

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.send("GET", path, headers=_named(headers))

    async def post(self, path: str, value: Any = None, **headers: str) -> Reply:
        """POST a value as JSON; None sends no body."""
        if value is None:
            return await self.send("POST", path, headers=_named(headers))
        return await self.send(
            "POST", path, json.dumps(value).encode(), {**JSON, **_named(headers)}
        )

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.url.startswith("unix:"):
            return await asyncio.open_unix_connection(self.url.removeprefix("unix:"))
        parts = urlsplit(self.url)
        return await asyncio.open_connection(parts.hostname, parts.port)

    def head(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The head of a request, with a Content-Length if there is a body."""
        all_headers = {"host": urlsplit(self.url).netloc or "localhost", **self.headers}
        all_headers |= headers or {}
        if body is not None:
            all_headers.setdefault("content-length", str(len(body)))
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in all_headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    async def submit(self, **more: Any) -> str:
        """A job, of which only the id matters."""
        reply = await self.post("/v1/jobs", {"task": "chat", "payload": {"n": 1}} | more)
        assert reply.status == 202, reply
        return str(reply.json["job_id"])

    async def follow(self, job_id: str, query: str = "", **headers: str) -> Following:
        """Open the event stream of a job; a refusal is an error here."""
        return await self.stream(f"/v1/jobs/{job_id}/events{query}", **headers)

    async def stream(self, path: str, **headers: str) -> Following:
        """Open an event stream."""
        reader, writer = await self.connect()
        writer.write(self.head("GET", path, None, _named(headers)))
        status, got = await read_head(reader)
        assert status == 200, (status, got)
        return Following(got, reader, writer)


class Following:
    """An open event stream."""

    def __init__(
        self, headers: dict[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.headers = headers
        self._reader = reader
        self._writer = writer

    async def __aiter__(self) -> AsyncIterator[SseEvent]:
        """Events and comments until the server ends the stream."""
        pending = b""
        while chunk := await _chunk(self._reader):
            pending += chunk
            while b"\n\n" in pending:
                raw, _, pending = pending.partition(b"\n\n")
                yield parse(raw.decode())
        assert not pending, f"the stream ended within a frame: {pending!r}"

    async def all(self, timeout_s: float = 20) -> list[SseEvent]:
        """Everything up to the end, comments left out."""
        async with asyncio.timeout(timeout_s):
            return [event async for event in self if event.name != ":"]

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()


def parse(raw: str) -> SseEvent:
    event = SseEvent()
    for line in raw.split("\n"):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "":
                event.name, event.data = event.name or ":", event.data or value
            case "event":
                event.name = value
            case "id":
                event.id = value
            case "data":
                assert not event.data, "data is one line"
                event.data = value
            case "retry":
                event.retry = int(value)
            case _:
                raise AssertionError(f"not a line of an event stream: {line!r}")
    return event


async def read_reply(reader: asyncio.StreamReader, *, head_only: bool = False) -> Reply:
    status, headers = await read_head(reader)
    if head_only or status == 204:
        return Reply(status, headers, b"")
    if headers.get("transfer-encoding") == "chunked":
        chunks = []
        while chunk := await _chunk(reader):
            chunks.append(chunk)
        return Reply(status, headers, b"".join(chunks))
    return Reply(status, headers, await reader.readexactly(int(headers["content-length"])))


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    pairs = (line.split(": ", 1) for line in lines)
    return int(first.split(" ")[1]), {name.lower(): value for name, value in pairs}


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """One piece of a chunked body; b"" at its end, or when the server cut the connection."""
    try:
        size = int(await reader.readuntil(b"\r\n"), 16)
        chunk = await reader.readexactly(size + 2)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    return chunk[:-2]


def _named(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
