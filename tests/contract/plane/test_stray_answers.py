"""How a worker reads a refusal: one of the plane itself, or one of a proxy before it."""

from __future__ import annotations

import asyncio
import json

import pytest

from tenure.core.errors import (
    ReplyLost,
    ServerError,
    StoreUnreachable,
    TenureError,
    UsageError,
)
from tenure.core.job import NewJob
from tenure.core.registry import open_queue

pytestmark = pytest.mark.clause("P-23")

PROXY = "<h1>default backend</h1>"


def problem(code: str) -> str:
    return json.dumps({"type": f"/docs#{code}", "code": code, "detail": "said so"})


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        *[(status, PROXY, ServerError) for status in (400, 401, 404, 405, 413, 415, 422, 500)],
        *[(status, PROXY, ReplyLost) for status in (502, 503, 504)],
        (429, PROXY, StoreUnreachable),
        (400, problem("bad_json"), UsageError),
        (413, problem("too_large"), UsageError),
        (422, problem("invalid"), UsageError),
        (404, problem("not_found"), ServerError),
        (429, problem("rate_limited"), StoreUnreachable),
        (503, problem("draining"), StoreUnreachable),
        (503, problem("store_away"), ReplyLost),
        (503, problem("store_refused"), ServerError),
    ],
)
async def test_only_a_refusal_of_the_plane_itself_is_for_good(
    status: int, body: str, kind: type[TenureError]
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status} No\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        queue = open_queue(f"plane+http://127.0.0.1:{port}")
        try:
            with pytest.raises(TenureError) as raised:
                await queue.submit([NewJob(task="t", payload=b"1", job_id="a")])
        finally:
            await queue.close()
    assert type(raised.value) is kind
