"""Good jobs flow while a hostile writer is at work on every key of their queue."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time

import pytest

from tenure.contracts.omniq import OmniqQueue
from tenure.core.errors import ServerError
from tenure.core.outcome import COMPLETED, Outcome
from tenure.core.registry import open_journal
from tenure.core.seam import Query
from tests.contract.omniq.conftest import Bench
from tests.contract.omniq.hostile import Hostile
from tests.waiting import until

LEASE_S = 12.0
ROUNDS = int(os.environ.get("TENURE_FUZZ_ROUNDS", "200"))  # more, by hand


class Flow:
    """Good jobs, two workers and a reader beside them."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self._bench = bench
        self._random = random.Random(seed)
        self.published: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.wrong: list[str] = []

    async def publish(self) -> None:
        """A few jobs of all kinds."""
        for _ in range(self._random.randint(1, 3)):
            gid = self._random.choice(["", "g0", "g1"])
            due_ms = self._random.choice([0, 0, self._bench.client.now_ms() + 50])
            began = time.monotonic()
            job_id = await self._bench.client.publish(
                self._bench.name, {"good": True}, gid=gid, due_ms=due_ms, group_limit=3,
                timeout_ms=round(LEASE_S * 1000), max_attempts=1,
            )  # fmt: skip
            self.published[job_id] = began

    async def work(self, queue: OmniqQueue) -> None:
        """Claim, run for a moment, settle."""
        while True:
            leases = await queue.claim(8, wait_ms=20)
            await asyncio.sleep(0.001)  # the handler
            verdicts = await queue.settle([Outcome(lease, "complete") for lease in leases])
            for lease, verdict in zip(leases, verdicts, strict=True):
                if lease.job_id not in self.published:
                    continue
                if verdict != COMPLETED or lease.job_id in self.ended:
                    self.wrong.append(f"{lease.job_id}, attempt {lease.attempt}: {verdict}")
                self.ended[lease.job_id] = time.monotonic()

    async def tend(self, queue: OmniqQueue) -> None:
        """What a worker does beside."""
        while True:
            await queue.upkeep()
            queue.take_quarantined()
            await asyncio.sleep(0.1)  # as often as it likes

    async def look(self) -> None:
        """What dashboards and followers do."""
        bench, ledger = self._bench, self._bench.ledger()
        journal = open_journal(bench.url())
        try:
            while True:
                await ledger.counts()
                await ledger.find(Query(limit=20))
                await ledger.workers()
                await bench.client.monitor.overview(bench.name)
                with contextlib.suppress(ServerError):  # of another type until the next step
                    await journal.read(limit=100)
                await asyncio.sleep(0.2)  # now and then
        finally:
            await journal.close()


@pytest.mark.clause("O-52", "O-53")
@pytest.mark.parametrize("seed", [1, 2])
async def test_good_jobs_run_once_and_in_time_whatever_others_write(
    bench: Bench, seed: int
) -> None:
    flow, hostile = Flow(bench, seed), Hostile(bench.raw, bench.name, seed)
    queues = [bench.queue(f"w{n}") for n in range(2)]
    tasks = [asyncio.create_task(flow.work(queue)) for queue in queues]
    tasks += [asyncio.create_task(flow.tend(queue)) for queue in queues]
    tasks += [asyncio.create_task(flow.look())]
    try:
        for _ in range(ROUNDS):
            await flow.publish()
            hostile.act()
            ended = [task for task in tasks if task.done()]
            assert not ended, ended[0].exception()
        await until(
            lambda: flow.published.keys() <= flow.ended.keys() or any(t.done() for t in tasks),
            "every good job has ended",
            within_s=LEASE_S + 10,
        )
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in results), results
    assert not flow.wrong, flow.wrong[:5]
    delays = sorted(flow.ended[job_id] - began for job_id, began in flow.published.items())
    assert delays[-1] < LEASE_S
    assert await bench.client.repair(bench.name) >= 0  # the last thing written may be the counters
    assert bench.raw.hget(bench.key("counters"), "quarantined")
    bench.raw.delete(*bench.raw.scan_iter(bench.key("*"), count=1000))
