"""A worker written from the contract's text alone, with plain redis-py.

worker.py REDIS_URL NAME: takes jobs one after the other for as long as it runs, and prints the id
of each. The payload says for how many seconds the job takes (`work_s`) and how many events it tells
meanwhile (`events`); each event carries the time at which it was sent.
"""

from __future__ import annotations

import json
import sys
import time

import redis

STREAM, GROUP = "jobs:stream", "workers"


def now_ms() -> int:
    return int(time.time() * 1000)


class Worker:
    def __init__(self, url: str, name: str) -> None:
        self.redis = redis.Redis.from_url(url, decode_responses=True)
        self.name = name
        try:
            self.redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def run(self) -> None:
        print("ready", flush=True)
        while True:
            reply = self.redis.xreadgroup(GROUP, self.name, {STREAM: ">"}, count=1, block=1000)
            for _, entries in reply or []:
                for msg_id, fields in entries:
                    self.process(msg_id, fields)

    def process(self, msg_id: str, fields: dict[str, str]) -> None:
        job_id = fields["job_id"]
        try:
            payload = json.loads(fields["payload"])
        except ValueError:
            payload = {"_raw": fields["payload"]}
        self.update(job_id, status="running")
        self.emit(job_id, "running", {})
        for number in range(payload.get("events", 0)):
            time.sleep(payload["work_s"] / payload["events"])
            self.emit(job_id, "progress", {"n": number, "sent_s": time.time()})
        if not payload.get("events"):
            time.sleep(payload.get("work_s", 0))
        self.update(job_id, status="done", result=json.dumps({"by": self.name}))
        self.emit(job_id, "done", {})
        self.redis.xack(STREAM, GROUP, msg_id)
        print(job_id, flush=True)

    def update(self, job_id: str, **fields: str) -> None:
        self.redis.hset(f"job:{job_id}", mapping={**fields, "updated_ts": str(now_ms())})
        self.refresh(job_id)

    def emit(self, job_id: str, kind: str, data: dict[str, object]) -> None:
        fields = {"type": kind, "ts": str(now_ms()), "step": "foreign", "data": json.dumps(data)}
        self.redis.xadd(f"job:{job_id}:events", fields)
        self.refresh(job_id)

    def refresh(self, job_id: str) -> None:
        ttl_s = int(self.redis.hget(f"job:{job_id}", "ttl_s") or 3600)
        self.redis.expire(f"job:{job_id}", ttl_s)
        self.redis.expire(f"job:{job_id}:events", ttl_s)


if __name__ == "__main__":
    Worker(sys.argv[1], sys.argv[2]).run()
