"""What our handlers do besides returning and raising, as Node's clients see it."""

from __future__ import annotations

from typing import Any

import pytest

from tenure import Job, Park, RateLimit, task
from tenure.contracts.bullmq import Flow, open_producer
from tenure.contracts.bullmq.ledger import BullmqLedger
from tenure.core.registry import open_ledger
from tests.interop.bullmq.ours import worker
from tests.interop.bullmq.peer import Node, NodeError
from tests.waiting import until


@pytest.mark.clause("B-46")
async def test_node_reads_the_lines_that_our_handler_logged(
    node: Node, name: str, url: str
) -> None:
    async with worker(url):
        data = {"log": "kůň drawn"}
        job = await node.acall(f"queue:{name}", "add", "work", data, {"keepLogs": 5})
        await node.aask(do="until", queue=name, id=job["id"])
    logs = await node.acall(f"queue:{name}", "getJobLogs", job["id"])
    assert logs == {"logs": ["kůň drawn"], "count": 1}


@pytest.mark.clause("B-21")
async def test_a_fatal_error_ends_a_node_job_at_its_first_attempt(
    node: Node, name: str, url: str
) -> None:
    async with worker(url):
        data = {"do": "fatal", "why": "no such film"}
        job = await node.acall(f"queue:{name}", "add", "work", data, {"attempts": 5})
        with pytest.raises(NodeError, match="no such film"):
            await node.aask(do="until", queue=name, id=job["id"])
    seen = await node.acall(f"queue:{name}", "getFailed")
    assert [(each["id"], each["attemptsMade"]) for each in seen] == [(job["id"], 1)]


@pytest.mark.clause("B-51", "B-22")
async def test_node_sees_a_parent_of_ours_wait_for_children_it_added(
    node: Node, name: str, url: str
) -> None:
    producer, ledger, low = open_producer(url), open_ledger(url), f"{name}-scenes"
    assert isinstance(ledger, BullmqLedger)

    @task("*")
    async def film(job: Job) -> Any:
        children = await ledger.children(job.id)
        if not children:
            scenes = [
                Flow(name="scene", queue=f"{name}-scenes", data={"result": n}) for n in (1, 2)
            ]
            await producer.add_children(job.id, scenes)
            raise Park
        return sorted(children.results.values())

    await node.aask(do="follow", queue=name)
    async with worker(url, handler=film):
        job = await node.acall(f"queue:{name}", "add", "film", {}, {"attempts": 1})
        at = f"job:{name}:{job['id']}"

        async def waits() -> bool:
            return bool(await node.acall(at, "getState") == "waiting-children")

        await until(waits, "the parent waits for its children")
        await node.aask(do="work", queue=low, **{"as": name})
        assert await node.aask(do="until", queue=name, id=job["id"]) == [1, 2]
        await node.aask(do="stop", **{"as": name})
    seen = [event for event, args, _ in await node.aask(do="seen", queue=name)]
    assert "waiting-children" in seen
    assert "error" not in seen
    await producer.close()
    await ledger.close()


@pytest.mark.clause("B-51", "B-15")
async def test_node_sees_the_queue_rest_when_our_handler_asks_for_it(
    node: Node, name: str, url: str
) -> None:
    tries: list[str] = []

    @task("*")
    async def work(job: Job) -> str:
        tries.append(job.id)
        if len(tries) == 1:
            raise RateLimit(0.5)
        return "done"

    limited = f"{url}&limit_max=100&limit_ms=1000"
    async with worker(limited, handler=work, concurrency=1):
        job = await node.acall(f"queue:{name}", "add", "work", {})

        async def rests() -> bool:
            return bool(await node.acall(f"queue:{name}", "getRateLimitTtl") > 0)

        await until(rests, "the limiter is set")
        assert await node.aask(do="until", queue=name, id=job["id"]) == "done"
    assert tries == [job["id"]] * 2
    (seen,) = await node.acall(f"queue:{name}", "getCompleted")
    assert seen["attemptsMade"] == 1


@pytest.mark.clause("B-1")
async def test_half_a_surrogate_pair_that_node_stored_is_a_payload(
    node: Node, name: str, url: str
) -> None:
    half = chr(0xD800)
    seen: list[Any] = []

    @task("*")
    async def look(job: Job) -> str:
        seen.append(job.payload)
        return "seen"

    producer = open_producer(url)
    async with worker(url, handler=look):
        job = await node.acall(f"queue:{name}", "add", "work", {"text": half})
        await node.aask(do="until", queue=name, id=job["id"])
        ours = await producer.add("work", {"text": half})
        await node.aask(do="until", queue=name, id=ours)
    assert seen == [{"text": half}] * 2
    assert (await node.acall(f"job:{name}:{ours}", "get:data")) == {"text": half}
    await producer.close()
