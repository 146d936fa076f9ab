"""Tenure's control plane on PostgreSQL: a gateway, and a worker that reaches it by HTTP."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from bench_kit import probe, serve

from tenure import NewJob, Worker, open_ledger, open_queue, task
from tenure.core.seam import Queue
from tenure.sql.schema import PostgresMigrations, migrate
from tenure.store.postgres import Postgres

BEST = 1_000
"""Slots of one worker for jobs that do nothing: while some are being ended, others are claimed."""

CHUNK = 2_000
SERVER = os.environ["BENCH_POSTGRES_URL"]
SYNCHRONOUS = "normal" if os.environ.get("BENCH_SYNCHRONOUS_COMMIT") == "off" else "full"
URL = f"plane+{SERVER}?synchronous={SYNCHRONOUS}"


@task("noop")
async def noop(job: Any) -> None:
    probe.noop()


class Producer:
    notes = "all by HTTP; journal, attempt, fence and token for every job"
    packages = ("tenure", "asyncpg", "uvloop")

    def __init__(self) -> None:
        self.queue = open_queue(URL)
        self.ledger = open_ledger(URL)
        self.far: Queue | None = None

    def worker(self, concurrency: int | None) -> list[str]:
        return ["python", "adapter.py", "worker"]

    def gateway(self, port: int) -> dict[str, Any]:
        """How a user starts the plane."""
        address = f"plane+http://127.0.0.1:{port}"
        self.far = open_queue(address)
        argv = ["tenure", "gateway", "--queue", URL, "--port", str(port)]
        env = {  # the load comes from one address with one key: without the limits of a key
            "TENURE_GATEWAY_RATE_PER_S": "0",
            "TENURE_GATEWAY_DEPTH_PER_KEY": "0",
            "TENURE_GATEWAY_CONNECTIONS_MAX": "20000",
            "TENURE_GATEWAY_TRUSTED_PROXIES": "127.0.0.1",
        }
        return {"argv": argv, "env": env, "worker_env": {"BENCH_PLANE": address}}

    async def submit(self, task: str, argument: int) -> None:
        """One job over HTTP, as a producer somewhere else would."""
        assert self.far is not None
        _check(await self.far.submit([_job(task, argument)]))

    async def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        jobs = [_job(task, argument) for argument in arguments]
        for start in range(0, len(jobs), CHUNK):
            _check(await self.queue.submit(jobs[start : start + CHUNK]))

    async def unfinished(self) -> int:
        states = (await self.ledger.counts()).states
        return states["QUEUED"] + states["RUNNING"]


def _job(name: str, argument: int) -> NewJob:
    return NewJob(task=name, payload=b'{"argument":%d}' % argument)


def _check(answers: Iterable[Any]) -> None:
    for answer in answers:
        if not answer.accepted:
            raise RuntimeError(f"not accepted: {answer}")


async def make() -> Producer:
    database = Postgres(SERVER, schema="tenure")
    await migrate(PostgresMigrations(database), "postgres")
    await database.close()
    return Producer()


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        slots = int(os.environ.get("BENCH_CONCURRENCY", BEST))
        Worker([noop], queues=[os.environ["BENCH_PLANE"]], concurrency=slots).run()
    else:
        serve(make)
