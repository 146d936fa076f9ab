"""Jobs that lead to other jobs, over every contract: submits of handlers, chains and gathers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tenure import Client, Conflict, InvalidJob, Job, JobCancelled, JobFailed, fixed, task
from tenure.core.errors import UsageError
from tenure.core.registry import open_queue
from tenure.core.seam import Query
from tenure.plans.flow import Step
from tests.contract.adapters import Stage, served_url
from tests.contract.suite.serving import serving

pytestmark = pytest.mark.clause("M-25")

SOON_S = 20.0


@task("add")
async def add(job: Job, n: int) -> int:
    """The sum of its own number and of the results before it."""
    before: list[int] = list(await job.children)
    return n + sum(before)


@task("double")
def double(job: Job) -> list[int]:
    return [2 * n for n in job.children]


@task("total")
async def total(job: Job) -> list[int]:
    return list(await job.children)


@task("break")
async def broken() -> None:
    raise ValueError("no")


TASKS = (add, double, total, broken)


@asynccontextmanager
async def client_of(stage: Stage) -> AsyncGenerator[Client]:
    async with Client(served_url(stage)) as client:
        yield client


def is_omniq(stage: Stage) -> bool:
    return served_url(stage).startswith("omniq")


async def task_ids(stage: Stage, name: str) -> list[str]:
    page = await stage.ledger.find(Query(task=name, limit=500))
    return sorted(job.job_id for job in page.jobs)


@pytest.mark.needs("flows")
async def test_a_chain_runs_its_jobs_in_order_each_with_the_result_before(stage: Stage) -> None:
    async with client_of(stage) as client, serving(stage, *TASKS, upkeep_ms=100):
        handle = await client.chain(add.call(n=1), add.call(n=10), ("add", {"n": 100}))
        assert await handle.result(timeout_s=SOON_S) == 111
        again = client.handle(handle.id, add)
        assert await again.result(timeout_s=SOON_S) == 111
        single = await client.chain(add.call(n=7))
        assert await single.result(timeout_s=SOON_S) == 7


@pytest.mark.needs("flows")
async def test_a_gather_gives_the_results_in_the_order_of_its_jobs(stage: Stage) -> None:
    numbers = list(range(25))
    async with client_of(stage) as client, serving(stage, *TASKS, upkeep_ms=100):
        handle = await client.gather([add.call(n=n) for n in numbers], then=total.call())
        assert await handle.result(timeout_s=SOON_S) == numbers
        doubled = await client.gather([("add", {"n": 2}), ("add", {"n": 3})], then=double)
        assert await doubled.result(timeout_s=SOON_S) == [4, 6]


@pytest.mark.needs("flows")
async def test_the_handle_of_a_chain_raises_the_error_of_the_job_that_failed(stage: Stage) -> None:
    async with client_of(stage) as client, serving(stage, *TASKS, upkeep_ms=100):
        handle = await client.chain(
            add.call(n=1), broken.call().with_options(attempts=1), add.call(n=10)
        )
        with pytest.raises(JobFailed, match=r"@1\.0 \(break\) failed: ValueError: no") as failed:
            await handle.result(timeout_s=SOON_S)
        assert 'raise ValueError("no")' in failed.value.traceback
        first = await client.chain(
            broken.call().with_options(attempts=1), add.call(n=1), add.call(n=10)
        )
        with pytest.raises(JobFailed, match=r"@0\.0 \(break\) failed: ValueError: no"):
            await first.result(timeout_s=SOON_S)
        assert await task_ids(stage, "total") == []


@pytest.mark.needs("flows")
async def test_the_events_of_a_chain_are_awaited_though_its_last_job_is_not_stored(
    stage: Stage,
) -> None:
    async with client_of(stage) as client:
        handle = await client.chain(add.call(n=1), add.call(n=2), add.call(n=3))
        events = handle.events()
        following = asyncio.ensure_future(anext(events))
        async with serving(stage, *TASKS, upkeep_ms=100), asyncio.timeout(SOON_S):
            seen = [await following, *[event async for event in events]]
        assert [event.state for event in seen if event.state] == ["done"]


@pytest.mark.needs("flows")
async def test_a_chain_that_was_not_begun_is_waiting_and_can_be_cancelled(stage: Stage) -> None:
    async with client_of(stage) as client:
        handle = await client.chain(add.call(n=1), add.call(n=2), add.call(n=3))
        assert (await handle.status()).state == "waiting"
        assert await handle.cancel() == "ended"
        with pytest.raises(JobCancelled):
            await handle.result(timeout_s=SOON_S)
        first = await client.get(handle.id.replace("@2.0", "@0.0"))
        assert first is not None
        assert first.state == "cancelled"


@pytest.mark.needs("flows")
async def test_the_same_id_again_is_the_same_chain(stage: Stage) -> None:
    async with client_of(stage) as client, serving(stage, *TASKS, upkeep_ms=100):
        calls = (add.call(n=1), add.call(n=2))
        first = await client.chain(*calls, id="import-17")
        second = await client.chain(*calls, id="import-17")
        assert first.id == second.id == "import-17@1.0"
        assert await first.result(timeout_s=SOON_S) == 3
        assert await second.result(timeout_s=SOON_S) == 3
        assert await task_ids(stage, "add") == ["import-17@0.0", "import-17@1.0"]
        with pytest.raises(UsageError, match="a job of a chain has no id"):
            await client.chain(add.call(n=1).with_options(id="mine"), add.call(n=2))
        with pytest.raises(UsageError, match="at least one job"):
            await client.gather([], then=total)


@pytest.mark.needs("flows")
async def test_another_chain_under_the_same_id_is_refused_and_changes_nothing(stage: Stage) -> None:
    async with client_of(stage) as client:
        first = await client.chain(add.call(n=1), add.call(n=2), id="import-18")
        for others in (
            [add.call(n=1), add.call(n=2), add.call(n=3)],
            [add.call(n=5), add.call(n=2)],
            [add.call(n=1), add.call(n=5)],
        ):
            with pytest.raises(Conflict, match=r"another chain .* under id 'import-18'"):
                await client.chain(*others, id="import-18")
        async with serving(stage, *TASKS, upkeep_ms=100):
            assert await first.result(timeout_s=SOON_S) == 3
            last = await client.submit(add, n=0)  # after it, a third step would have run
            await last.result(timeout_s=SOON_S)
        ids = await task_ids(stage, "add")
        assert [job_id for job_id in ids if job_id.startswith("import-18")] == [
            "import-18@0.0",
            "import-18@1.0",
        ]


@pytest.mark.needs("flows")
async def test_a_worker_that_dies_before_it_settles_a_step_repeats_nothing(stage: Stage) -> None:
    if served_url(stage).startswith(("bullmq", "plane")):
        return  # one step of the store
    queue = open_queue(served_url(stage), worker_id="dies")
    flows = queue.features.flows
    assert flows is not None
    async with client_of(stage) as client:
        handle = await client.gather([add.call(n=1), add.call(n=2)], then=total, id="g")
        # Both steps are completed twice: by workers that died, at the same time, and again.
        for result in (b"1", b"2"):
            await asyncio.gather(
                *(flows.finished(Step("g", 0, n).id, result) for n in (0, 1)),
                *(flows.finished(Step("g", 0, n).id, result) for n in (0, 1)),
            )
        assert await task_ids(stage, "total") == ["g@1.0"]
        async with serving(stage, *TASKS, upkeep_ms=100):
            assert await handle.result(timeout_s=SOON_S) == [1, 1]
        assert await task_ids(stage, "total") == ["g@1.0"]
    await queue.close()


async def test_where_jobs_cannot_be_chained_the_contract_says_so(stage: Stage) -> None:
    async with client_of(stage) as client:
        if is_omniq(stage):
            with pytest.raises(UsageError, match=r"omniq cannot chain or gather.*streams"):
                await client.chain(add.call(n=1), add.call(n=2))
            assert await task_ids(stage, "add") == []


async def test_a_job_that_a_handler_submits_is_the_same_in_every_attempt(stage: Stage) -> None:
    seen: list[list[str]] = []

    @task("parent", retry=fixed(0, max_attempts=3))
    async def parent(job: Job) -> list[str]:
        ids = [await job.submit("child", {"n": n}) for n in (1, 2, 2)]
        ids.append(await job.submit(child.call(n=9), attempts=2))
        ids.append(await job.submit("child", {"n": 8}, id=None))
        seen.append(ids)
        if job.attempt < 3:
            raise ValueError("again")
        return ids

    @task("child")
    async def child(n: int) -> int:
        return n

    async with client_of(stage) as client, serving(stage, parent, child, upkeep_ms=100):
        handle = await client.submit("parent", {}, attempts=3)
        ids = await handle.result(timeout_s=SOON_S)
        assert len(set(ids)) == 5
        assert seen == [ids] * 3
        results = [await client.handle(each).result(timeout_s=SOON_S) for each in ids]
        assert results == [1, 2, 2, 9, 8]
        assert await task_ids(stage, "child") == sorted(ids)


async def test_what_a_queue_refuses_is_raised_in_the_handler(stage: Stage) -> None:
    caught: list[str] = []

    @task("parent")
    def parent(job: Job) -> str:
        try:
            job.submit("child", {"n": 1}, attempts=0)
        except InvalidJob as error:
            caught.append(str(error))
        first: str = job.submit("child", {"n": 1}, id="child-1")
        try:
            job.submit("child", {"n": 2}, id="child-1")
        except Conflict as error:
            caught.append(str(error))
        return first

    async with client_of(stage) as client, serving(stage, parent, upkeep_ms=100):
        handle = await client.submit("parent", {})
        assert await handle.result(timeout_s=SOON_S) == "child-1"
        assert len(caught) == 2
