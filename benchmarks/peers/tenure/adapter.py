"""Tenure itself, on its own contract; and what clients of its event streams need."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from bench_kit import redis_url
from tenure_kit import QueueProducer, main

from tenure import open_queue
from tenure.core.lease import Lease, Report

CHUNK = 500
OPTIONS = os.environ.get("BENCH_URL_OPTIONS", "")
URL = f"streams+{redis_url()}" + (f"?{OPTIONS}" if OPTIONS else "")


class Producer(QueueProducer):
    """The producer, and a publisher of events for clients that follow jobs."""

    def __init__(self) -> None:
        super().__init__(
            URL,
            "hiredis",
            notes="every effect of the streams contract: hash, events, TTLs, result, journal, ack",
            chunk=CHUNK,
            ended=("done", "error", "canceled"),
        )
        # Leases of the jobs that SSE clients follow; long, so that nobody has to extend them here.
        self.followed_queue = open_queue(
            f"{URL}{'&' if OPTIONS else '?'}lease_ms=3600000", worker_id="publisher"
        )
        self.leases: list[Lease] = []

    def gateway(self, port: int) -> dict[str, Any]:
        """How a user starts the gateway."""
        argv = ["tenure", "gateway", "--queue", URL, "--port", str(port)]
        env = {  # the load comes from one address with one key: without the limits of a key
            "TENURE_GATEWAY_RATE_PER_S": "0",
            "TENURE_GATEWAY_DEPTH_PER_KEY": "0",
            "TENURE_GATEWAY_STREAMS_PER_KEY": "20000",
            "TENURE_GATEWAY_CONNECTIONS_MAX": "20000",
            "TENURE_GATEWAY_TRUSTED_PROXIES": "127.0.0.1",
        }
        body = '{"task": "chat", "payload": {"prompt": "hello"}}'
        return {"argv": argv, "env": env, "body": body}

    async def follow(self, count: int) -> dict[str, Any]:
        """Start `count` jobs that clients can follow; answers their ids."""
        await self.submit_bulk("nap", range(count))
        while len(self.leases) < count:
            self.leases += await self.followed_queue.claim(CHUNK, wait_ms=1_000)
        return {"job_ids": [lease.job_id for lease in self.leases]}

    async def publish(self, rate: int, seconds: float) -> dict[str, Any]:
        """One event at a time, spread over the followed jobs, `rate` a second in all."""
        began, count = time.monotonic(), int(rate * seconds)
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            lease = self.leases[number * 7919 % len(self.leases)]
            data = b'{"t":%d}' % time.monotonic_ns()
            (refused,) = await self.followed_queue.report([Report(lease=lease, data=data)])
            if refused is not None:
                raise refused
        return {"count": count, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    main(URL, Producer, slots=1_000)
