"""A gateway written from the contract's text alone, with FastAPI and plain redis-py.

gateway.py REDIS_URL PORT
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

import redis.asyncio
import uvicorn
from fastapi import FastAPI, Header, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

JOB_TTL_S = 3600
FINAL = ("done", "error", "canceled")

app = FastAPI()
store = redis.asyncio.Redis.from_url(sys.argv[1], decode_responses=True)


class CreateJobRequest(BaseModel):
    task: Literal["chat", "plan", "code", "tool", "rag", "embed"]
    payload: dict[str, Any]
    ttl_s: int | None = None


@app.post("/v1/jobs", status_code=202)
async def create(
    request: CreateJobRequest, idempotency_key: str | None = Header(default=None)
) -> dict[str, Any]:
    job_id, ttl_s = str(uuid.uuid4()), request.ttl_s or JOB_TTL_S
    if idempotency_key:
        kept = await store.get(f"idempotency:{idempotency_key}")
        if kept and await store.exists(f"job:{kept}"):
            return await read(kept)
        await store.set(f"idempotency:{idempotency_key}", job_id, ex=ttl_s)
    now, payload = str(int(time.time() * 1000)), json.dumps(request.payload)
    fields = {
        "job_id": job_id, "task": request.task, "payload": payload, "status": "queued",
        "created_ts": now, "updated_ts": now, "ttl_s": str(ttl_s), "result": "", "error": "",
    }  # fmt: skip
    await store.hset(f"job:{job_id}", mapping=fields)
    await store.expire(f"job:{job_id}", ttl_s)
    event = {"type": "queued", "ts": now, "step": "gateway.enqueue", "data": "{}"}
    await store.xadd(f"job:{job_id}:events", event)
    await store.expire(f"job:{job_id}:events", ttl_s)
    entry = {"job_id": job_id, "task": request.task, "payload": payload}
    await store.xadd("jobs:stream", entry)
    return await read(job_id)


@app.get("/v1/jobs/{job_id}")
async def read(job_id: str) -> dict[str, Any]:
    job: dict[str, Any] = await store.hgetall(f"job:{job_id}")
    if not job:
        raise HTTPException(404)
    for name in ("payload", "result", "error"):
        job[name] = json.loads(job[name]) if job.get(name) else None
    return job


@app.get("/v1/jobs/{job_id}/events")
async def events(job_id: str) -> StreamingResponse:
    if not await store.exists(f"job:{job_id}"):
        raise HTTPException(404)
    return StreamingResponse(tail(job_id), media_type="text/event-stream")


async def tail(job_id: str) -> AsyncIterator[str]:
    yield "event: hello\ndata: {}\n\n"
    key, last_id = f"job:{job_id}:events", "0-0"
    while True:
        reply = await store.xread({key: last_id}, block=1000)
        if not reply:
            yield ": heartbeat\n\n"
        for _, entries in reply:
            for entry_id, fields in entries:
                last_id = entry_id
                yield f"event: {fields['type']}\ndata: {fields['data']}\n\n"
                if fields["type"] in FINAL:
                    return


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
