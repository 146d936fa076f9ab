"""The official `omniq` package for Python: its client, its consumer, and its scripts pipelined."""

from __future__ import annotations

import sys
import time
from typing import Any

import redis
from bench_kit import probe, redis_port, serve
from omniq import OmniqClient

QUEUE = "bench"
GROUPS = 1_000
IN_FLIGHT = 100


def handle(ctx: Any) -> None:
    match ctx.payload["task"]:
        case "noop" | "grouped":
            probe.noop()
        case "stamp":
            probe.stamp(ctx.payload["argument"])
        case _:
            probe.nap_blocking(ctx.payload["argument"])


class Recorder:
    """Hands every call to redis-py, and remembers how the client ran its scripts."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.calls: list[tuple[Any, ...]] = []

    def evalsha(self, *args: Any) -> Any:
        self.calls.append(args)
        return self._client.evalsha(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class Producer:
    notes = "the last 100 completed jobs kept, one job at a time, a thread per job for its lease"
    packages = ("omniq", "redis", "hiredis")

    def __init__(self) -> None:
        self.redis = redis.Redis(port=redis_port())
        self.client = OmniqClient(host="127.0.0.1", port=redis_port())

    def worker(self, concurrency: int | None) -> list[str]:
        return ["python", "adapter.py", "worker"]

    def submit(self, task: str, argument: int) -> None:
        gid = f"g{argument % GROUPS}" if task == "grouped" else None
        self.client.publish(queue=QUEUE, payload={"task": task, "argument": argument}, gid=gid)

    def unfinished(self) -> int:
        stats = self.redis.hmget(f"{{{QUEUE}}}:stats", "waiting_total", "delayed", "active")
        return sum(int(value or 0) for value in stats)

    def pipelined(self, count: int) -> dict[str, Any]:
        """Reserve and ack, by its own scripts, a hundred in flight on one connection."""
        recorder = Recorder(redis.Redis(port=redis_port(), decode_responses=True))
        client = OmniqClient(redis=recorder)
        client.publish(queue=QUEUE, payload={"task": "noop", "argument": 0})
        sha, keys, anchor, *_ = self._recorded(recorder, lambda: client.reserve(queue=QUEUE))
        self._fill(count)
        ack_sha = self._ack_sha(client, recorder)
        plain = redis.Redis(port=redis_port())
        began, done = time.perf_counter(), 0
        while done < count - IN_FLIGHT:
            pipeline = plain.pipeline(transaction=False)
            for _ in range(IN_FLIGHT):
                pipeline.evalsha(sha, keys, anchor, int(time.time() * 1000))
            jobs = [reply for reply in pipeline.execute() if reply[0] == b"JOB"]
            pipeline = plain.pipeline(transaction=False)
            for reply in jobs:
                pipeline.evalsha(ack_sha, 1, anchor, reply[1], int(time.time() * 1000), reply[-1])
            answers = pipeline.execute()
            assert all(answer[0] == b"OK" for answer in answers), answers[:3]
            done += len(jobs)
        return {"jobs_per_s": done / (time.perf_counter() - began)}

    def _recorded(self, recorder: Recorder, call: Any) -> tuple[Any, ...]:
        recorder.calls.clear()
        call()
        return recorder.calls[-1]

    def _ack_sha(self, client: Any, recorder: Recorder) -> Any:
        job = client.reserve(queue=QUEUE)
        return self._recorded(
            recorder,
            lambda: client.ack_success(queue=QUEUE, job_id=job.job_id, lease_token=job.lease_token),
        )[0]

    def _fill(self, count: int) -> None:
        for number in range(count):
            self.submit("noop", number)

    def blocked(self, count: int) -> dict[str, Any]:
        """The longest script of removing a hundred jobs out of the middle of many."""
        ids = [
            self.client.publish(queue=QUEUE, payload={"argument": number})
            for number in range(count)
        ]
        self.redis.config_set("slowlog-max-len", 10_000)
        self.redis.config_set("slowlog-log-slower-than", 0)
        self.redis.slowlog_reset()
        middle = ids[count // 2 : count // 2 + 100]
        self.client.remove_jobs_batch(queue=QUEUE, lane="wait", job_ids=middle)
        entries = self.redis.slowlog_get(10_000)
        self.redis.config_set("slowlog-log-slower-than", 10_000)
        return {"ms": max(e["duration"] for e in entries if e["command"].startswith(b"EVAL")) / 1e3}


def work() -> None:
    OmniqClient(host="127.0.0.1", port=redis_port()).consume(queue=QUEUE, handler=handle)


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        work()
    else:
        serve(Producer)
