"""The reference for server-sent events: one Redis connection a client (see server.py)."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

from bench_kit import redis_url, serve
from redis.asyncio import Redis


class Producer:
    notes = "one XREAD BLOCK and one Redis connection for every client"
    packages = ("starlette", "uvicorn", "redis", "hiredis")

    def __init__(self) -> None:
        self.redis = Redis.from_url(redis_url())
        self.job_ids: list[str] = []

    def worker(self, concurrency: int | None) -> list[str]:
        return ["uvicorn", "server:app"]

    def submit(self, task: str, argument: int) -> None:
        raise NotImplementedError("this reference only serves events")

    def unfinished(self) -> int:
        return 0

    def gateway(self, port: int) -> dict[str, Any]:
        flags = ["--port", str(port), "--log-level", "warning", "--backlog", "4096"]
        return {"argv": ["uvicorn", "server:app", *flags]}

    async def follow(self, count: int) -> dict[str, Any]:
        """`count` running jobs as the contract stores them."""
        self.job_ids = [str(uuid4()) for _ in range(count)]
        for start in range(0, count, 500):
            async with self.redis.pipeline(transaction=False) as pipeline:
                for job_id in self.job_ids[start : start + 500]:
                    pipeline.hset(f"job:{job_id}", mapping={"job_id": job_id, "status": "running"})
                    self._event(pipeline, job_id, "queued", "{}")
                    self._event(pipeline, job_id, "running", "{}")
                await pipeline.execute()
        return {"job_ids": self.job_ids}

    async def publish(self, rate: int, seconds: float) -> dict[str, Any]:
        """One event at a time, spread over the followed jobs, `rate` a second in all."""
        began, count = time.monotonic(), int(rate * seconds)
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            job_id = self.job_ids[number * 7919 % len(self.job_ids)]
            await self._event(self.redis, job_id, "progress", f'{{"t":{time.monotonic_ns()}}}')
        return {"count": count, "seconds": time.monotonic() - began}

    @staticmethod
    def _event(redis: Any, job_id: str, kind: str, data: str) -> Any:
        fields = {"type": kind, "ts": str(time.time_ns() // 1_000_000), "step": "", "data": data}
        return redis.xadd(f"job:{job_id}:events", fields)


if __name__ == "__main__":
    serve(Producer)
