"""Workers and their queues on a cluster and with Sentinels, while the topology changes under load.

Jobs are submitted until they are acknowledged, and their ids make a resend harmless. Afterwards the
journal goes through the history checker.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tenure.core.errors import ReplyLost, StoreUnreachable
from tenure.core.job import NewJob
from tenure.core.journal import JournalEvent
from tenure.core.registry import open_journal, open_queue
from tenure.store.redis.cluster import slot_of
from tenure.worker import Job, Settings, Worker, task
from tests.chaos.verdict import check
from tests.redis_topologies import RedisCluster, SentinelSet
from tests.waiting import until

pytestmark = [pytest.mark.few, pytest.mark.timeout(240)]

CONTRACTS = ["streams", "bullmq", "omniq"]
RECOVERED_WITHIN_S = 15.0
MOVES = 3


class Load:
    """Jobs that are submitted one after the other, and a worker that does them."""

    def __init__(self, contract: str, store_url: str, more: str = "") -> None:
        name = self.name = secrets.token_hex(4)
        own = {
            "streams": f"namespace={{{name}}}:{more}",
            "bullmq": f"queue=q&prefix={{{name}}}",
            "omniq": f"queue={name}&keep_completed=100000",
        }
        self.url = f"{contract}+{store_url}?{own[contract]}"
        self.slot = slot_of(f"{{{name}}}")
        self.stored: list[str] = []
        self.done: set[str] = set()
        self.stopping = False
        self.submitting: asyncio.Task[None] | None = None

    async def submit(self) -> None:
        """Submit until told to stop; a job counts when it is acknowledged."""
        queue = open_queue(self.url)
        for number in itertools.count():
            if self.stopping:
                break
            job = NewJob(task="work", payload=b"{}", job_id=f"j{number}")
            while True:
                try:
                    (answer,) = await queue.submit([job])
                    assert answer.accepted, answer
                    break
                except (StoreUnreachable, ReplyLost):
                    await asyncio.sleep(0.05)  # as a client would, before it tries again
            self.stored.append(job.job_id)
            await asyncio.sleep(0.003)  # the rate of the load
        await queue.close()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Submit and work as long as the block lasts."""

        @task("work")
        async def work(job: Job) -> None:
            self.done.add(job.id)

        worker = Worker(
            [work], queues=[self.url], settings=Settings(concurrency=10, backoff_ms_max=500)
        )
        served = asyncio.ensure_future(worker.serve())
        self.submitting = asyncio.create_task(self.submit())
        await until(lambda: len(self.done) > 20)
        yield
        self.stopping = True
        await self.submitting
        assert not served.done(), "the worker went on"
        worker.stop()
        assert await served == 0

    async def drained(self) -> None:
        """Submit no more, and wait until every job that was stored has run."""
        assert self.submitting
        self.stopping = True
        await self.submitting
        await until(lambda: self.done >= set(self.stored), within_s=60)

    async def works_again(self) -> float:
        """How long it takes until a job that is stored from now on is done."""
        began, count = time.monotonic(), len(self.stored)
        await until(
            lambda: len(self.stored) > count + 5 and self.stored[count + 5] in self.done,
            within_s=RECOVERED_WITHIN_S,
        )
        return time.monotonic() - began

    async def history(self) -> list[JournalEvent]:
        """The whole journal."""
        journal = open_journal(self.url)
        events: list[JournalEvent] = []
        while more := await journal.read(after=events[-1].seq if events else ""):
            events += more
        await journal.close()
        return events


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_a_busy_slot_moves_and_no_job_is_lost(contract: str, cluster: RedisCluster) -> None:
    load = Load(contract, cluster.url)

    def move() -> None:
        source, target = cluster.begin_move(load.slot)
        while cluster.move_keys(load.slot, source, target, 25):
            time.sleep(0.01)  # a real migration takes its time: here all of the slot is in between
        cluster.end_move(load.slot, source, target)

    async with load.running():
        for _ in range(MOVES):
            await asyncio.to_thread(move)
            await load.works_again()
        await load.drained()
    verdict = check(await load.history(), quiesced=True)
    assert verdict.ok, str(verdict)
    assert verdict.jobs == len(load.stored)


@pytest.mark.parametrize("fault", ["planned", "killed", "hanging"])
@pytest.mark.parametrize("topology", ["cluster", "sentinel"])
@pytest.mark.parametrize("contract", CONTRACTS)
async def test_workers_work_again_in_time_when_their_primary_is_replaced(
    contract: str, topology: str, fault: str, request: pytest.FixtureRequest
) -> None:
    """A planned failover loses nothing. Otherwise Redis may lose what was not replicated yet."""
    servers: RedisCluster | SentinelSet = request.getfixturevalue(
        "cluster" if topology == "cluster" else "watched"
    )
    load = Load(contract, servers.url)
    async with load.running():
        primary = servers.owner(load.slot)
        if fault == "planned":
            await asyncio.to_thread(servers.fail_over, load.slot)
        elif fault == "killed":
            primary.kill()
        else:
            primary.signal(signal.SIGSTOP)
        await load.works_again()
        if fault == "killed":
            await asyncio.to_thread(primary.start)
        elif fault == "hanging":
            primary.signal(signal.SIGCONT)
    events = await load.history()
    verdict = check(events, quiesced=False)
    assert verdict.ok, str(verdict)
    lost = set(load.stored) - {event.job_id for event in events}
    assert fault != "planned" or not lost
