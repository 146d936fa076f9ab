"""A gateway with real queues and real workers behind it, in a loop of its own thread.

Playwright's calls block, so the tests are plain functions; `Stand.run` does something in the loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from tenure import Job, exponential, task
from tenure.core.job import NewJob
from tenure.core.outcome import Fatal
from tenure.core.portable import state_of
from tenure.core.registry import contract_names, open_ledger, open_queue
from tenure.core.seam import Ledger
from tenure.gateway.server import RunningGateway, serving
from tenure.gateway.settings import GatewaySettings
from tenure.worker.config import Settings
from tenure.worker.worker import Worker
from tests.contract.adapters import Servers, Stage, adapters, served_url
from tests.contract.gateway.embedded import served

T = TypeVar("T")

# The reference lives in one process and on a clock of the test's: nobody serves it over a gateway.
CONTRACTS = [name for name in contract_names() if name != "memory"]


@task("greet")
async def greet(job: Job) -> dict[str, str]:
    await job.report(50, "half way")
    return {"text": f"Hello, {job.payload.get('name', 'you')}!"}


@task("boom", retry=exponential(20, max_attempts=2))
async def boom(job: Job) -> None:
    raise ValueError(f"no such thing: {job.payload.get('n', 7)}")


@task("reject")
async def reject(job: Job) -> None:
    raise Fatal("refused: <b>not HTML</b>")


@task("slow")
async def slow(job: Job) -> str:
    for step in range(600):
        await job.report(step / 6, f"step {step}")
        await asyncio.sleep(0.1)  # its work
    return "slow"


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 60) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Stand:
    """Some queues, a gateway before them, and workers behind them if asked for."""

    def __init__(self, loop: Loop, servers: Servers) -> None:
        self._loop = loop
        self._servers = servers
        self._stack = AsyncExitStack()
        self.stages: dict[str, Stage] = {}
        self.names: dict[str, str] = {}
        self.gateway: RunningGateway | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    @property
    def url(self) -> str:
        assert self.gateway is not None
        return self.gateway.url

    def open(self, *contracts: str, **settings: Any) -> Stand:
        """Open queues of these contracts (all there are, without a word) and a gateway."""
        self.run(self._open(contracts or tuple(CONTRACTS), settings))
        return self

    def work(self, *contracts: str, concurrency: int = 20) -> None:
        """Start a worker for these queues; all without a word."""
        urls = [self.stages[name].url for name in contracts or self.stages]
        tasks = [greet, boom, reject, slow]
        worker = Worker(
            tasks, queues=urls, concurrency=concurrency, settings=Settings(drain_ms=100)
        )

        async def start() -> None:
            running = asyncio.create_task(worker.serve())

            async def stop() -> None:
                worker.stop()
                await running

            self._stack.push_async_callback(stop)

        self.run(start())

    def serve(self, app: Any) -> str:
        """Serve an application by plain uvicorn; returns its URL."""
        return self.run(self._stack.enter_async_context(served(app)))

    def submit(self, contract: str, *jobs: NewJob) -> list[str]:
        async def submit() -> list[str]:
            queue = open_queue(served_url(self.stages[contract]))
            try:
                return [made.job_id for made in await queue.submit(jobs) if made.accepted]
            finally:
                await queue.close()

        ids = self.run(submit())
        assert len(ids) == len(jobs), "a job was refused"
        return ids

    def ask(self, contract: str, question: Callable[[Ledger], Coroutine[Any, Any, T]]) -> T:
        async def ask() -> T:
            ledger = open_ledger(served_url(self.stages[contract]))
            try:
                return await question(ledger)
            finally:
                await ledger.close()

        return self.run(ask())

    def state(self, contract: str, job_id: str) -> str:
        """The state of a job that all contracts share."""
        job = self.ask(contract, lambda ledger: ledger.get(job_id))
        return state_of(job) if job else "missing"

    def wait_for(self, contract: str, job_id: str, states: tuple[str, ...]) -> None:
        """Until the job is in one of these states."""
        deadline = time.monotonic() + 20
        while self.state(contract, job_id) not in states:
            assert time.monotonic() < deadline, f"{job_id} is {self.state(contract, job_id)}"
            time.sleep(0.05)  # a poll, bounded by the deadline

    def close(self) -> None:
        self.run(self._stack.aclose())

    async def _open(self, contracts: tuple[str, ...], settings: dict[str, Any]) -> None:
        known = adapters(self._servers)
        for name in contracts:
            assert name in known, f"contracts/{name} has no adapter in tests/contract/adapters.py"
            stage = await known[name].open(lease_ms=10_000)
            self._stack.push_async_callback(stage.close)
            self.stages[name] = stage
        urls = tuple(served_url(stage) for stage in self.stages.values())
        made = GatewaySettings(queues=urls, **{"port": 0, **settings})
        self.gateway = await self._stack.enter_async_context(serving(made))
        for contract, queue in zip(self.stages, self.gateway.gateway.queues, strict=True):
            self.names[contract] = queue.name
