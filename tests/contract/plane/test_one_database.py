"""An inbox and a plane in one database: each has ids of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tenure.core.job import NewJob
from tenure.core.outcome import Completed, Failure, Outcome, Retried
from tenure.core.registry import open_ledger, open_queue
from tests.contract.adapters import Servers
from tests.contract.inbox_stage import migrated

CONTRACTS = ("inbox", "plane")


class Both:
    """The queues and ledgers of two contracts over the same tables."""

    def __init__(self, store: str, stack: AsyncExitStack) -> None:
        self.urls = {name: f"{name}+{store}" for name in CONTRACTS}
        self.stack = stack

    def queue(self, contract: str) -> Any:
        return self._kept(open_queue(self.urls[contract], worker_id="w1"))

    def ledger(self, contract: str) -> Any:
        return self._kept(open_ledger(self.urls[contract]))

    def _kept(self, thing: Any) -> Any:
        self.stack.push_async_callback(thing.close)
        return thing


@pytest.fixture(params=["sqlite", "postgres"])
async def both(
    request: pytest.FixtureRequest, tmp_path: Path, servers: Servers
) -> AsyncGenerator[Both]:
    async with AsyncExitStack() as stack:
        if request.param == "sqlite":
            yield Both(f"sqlite:///{tmp_path}/both.db?synchronous=normal", stack)
            return
        server, schema = servers.postgres(), f"both_{tmp_path.name.replace('-', '_')}".lower()[:50]
        await migrated(server, schema)
        mark = "&" if "?" in server else "?"
        yield Both(f"{server}{mark}schema={schema}&synchronous=normal", stack)


async def _one(both: Both, contract: str) -> tuple[Any, Any]:
    queue = both.queue(contract)
    (stored,) = await queue.submit(
        [NewJob(task="t", payload=b"{}", job_id="order-17", idempotency_key="k")]
    )
    assert stored.accepted
    (lease,) = await queue.claim(1, wait_ms=0)
    return queue, lease


@pytest.mark.clause("P-1", "P-15")
async def test_the_same_id_in_an_inbox_and_a_plane_names_two_jobs(both: Both) -> None:
    (inbox, first), (plane, second) = await asyncio.gather(
        *(_one(both, name) for name in CONTRACTS)
    )
    failed = Outcome(first, "fail", failure=Failure(code="Broken", message="", retryable=True))
    done = Outcome(second, "complete", b"1")
    for _ in range(2):  # sent again, each is answered with its own verdict
        assert isinstance((await inbox.settle([failed]))[0], Retried)
        assert (await plane.settle([done]))[0] == Completed()
    (left,) = await both.ledger("inbox").attempts("order-17")
    (right,) = await both.ledger("plane").attempts("order-17")
    assert (left["verdict"], right["verdict"]) == ("retry", "complete")


@pytest.mark.clause("P-1")
async def test_what_is_removed_from_a_plane_stays_in_the_inbox(both: Both) -> None:
    (inbox, first), (plane, second) = await asyncio.gather(
        *(_one(both, name) for name in CONTRACTS)
    )
    for queue, lease in ((inbox, first), (plane, second)):
        await queue.settle([Outcome(lease, "complete", b"1")])
    assert await both.ledger("plane").remove(["order-17"]) == ["ok"]
    ledger = both.ledger("inbox")
    assert [each["verdict"] for each in await ledger.attempts("order-17")] == ["complete"]
    again = NewJob(task="t", payload=b"{}", job_id="order-17", idempotency_key="k")
    assert (await inbox.submit([again]))[0].status == "replayed"
    assert await both.ledger("plane").get("order-17") is None
