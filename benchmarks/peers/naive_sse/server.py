"""Server-sent events as they are usually written: every client blocks in an XREAD of its own."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator

from redis.asyncio import Redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

BLOCK_MS = 15_000
TERMINAL = {"done", "error", "canceled"}

# Its defaults would lose the comparison for it: a read times out after 5 s, shorter than the XREAD
# blocks, so that every client of a quiet job is cut off, and the pool ends at 100 connections.
redis = Redis.from_url(
    os.environ["BENCH_REDIS_URL"],
    decode_responses=True,
    max_connections=20_000,
    socket_timeout=None,
    socket_connect_timeout=60,
)


async def follow(job_id: str) -> AsyncIterator[str]:
    yield "event: hello\ndata: {}\n\n"
    last_id = "0"
    while True:
        streams = await redis.xread({f"job:{job_id}:events": last_id}, count=100, block=BLOCK_MS)
        if not streams:
            yield ": still here\n\n"
            continue
        entries = streams[f"job:{job_id}:events"][0] if isinstance(streams, dict) else streams[0][1]
        for last_id, fields in entries:
            data = {**fields, "data": json.loads(fields["data"])}
            yield f"id: {last_id}\nevent: {fields['type']}\ndata: {json.dumps(data)}\n\n"
            if fields["type"] in TERMINAL:
                return


async def events(request: Request) -> Response:
    job_id = request.path_params["job_id"]
    if not await redis.exists(f"job:{job_id}"):
        return JSONResponse({"title": "no such job"}, 404)
    return StreamingResponse(follow(job_id), media_type="text/event-stream")


app = Starlette(routes=[Route("/v1/jobs/{job_id}/events", events)])
