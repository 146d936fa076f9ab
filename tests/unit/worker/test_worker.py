"""The worker as a whole: one life, many queues, and what happens when a part of it breaks."""

import asyncio
import threading

import pytest

from tenure.core.errors import UsageError
from tenure.core.outcome import Outcome, Verdict
from tenure.worker import Job, Worker, task
from tests.unit.worker.seam import Store, View, serving


@task("noop")
async def noop(job: Job) -> None:
    return None


async def test_a_worker_serves_once() -> None:
    worker = Worker([noop], queues=[Store().open], burst=True)
    await worker.serve()
    with pytest.raises(UsageError, match="serves once"):
        await worker.serve()


async def test_a_worker_that_was_stopped_before_it_served_ends_at_once() -> None:
    worker = Worker([noop], queues=[Store().open])
    worker.stop()
    assert await asyncio.wait_for(worker.serve(), 5) == 0


async def test_a_worker_can_be_stopped_from_another_thread() -> None:
    worker = Worker([noop], queues=[Store().open])
    async with serving(worker) as serve:
        await worker.watch.until("ready")
        threading.Thread(target=worker.stop).start()
        assert await asyncio.wait_for(serve, 5) == 0


async def test_one_worker_serves_many_queues() -> None:
    stores = [Store(name=f"q{number}") for number in range(5)]
    seen: list[tuple[str, str]] = []

    @task("noop")
    async def noting(job: Job) -> None:
        seen.append((job.queue, job.id))

    for store in stores:
        store.add("noop", 3)
    await Worker([noting], queues=[store.open for store in stores], burst=True).serve()
    assert len(set(seen)) == 15


async def test_a_broken_part_stops_the_worker_in_order_with_exit_code_1() -> None:
    """A verdict of no known kind is a bug of the contract: say so, do not limp on."""

    class Broken(View):
        async def settle(self, outcomes: object) -> list[Verdict]:
            return [None]  # type: ignore[list-item]

    store = Store()
    store.add("noop")
    worker = Worker([noop], queues=[lambda: Broken(store)])
    assert await asyncio.wait_for(worker.serve(), 10) == 1


async def test_a_keeper_that_cannot_open_its_queue_stops_the_worker() -> None:
    """Without a keeper every long job would lose its lease."""
    store, opened = Store(), []

    def once() -> View:
        opened.append(1)
        if len(opened) > 1:
            raise OSError("no more connections")
        return store.open()

    worker = Worker([noop], queues=[once])
    assert await asyncio.wait_for(worker.serve(), 10) == 1


async def test_answers_that_do_not_match_their_batch_are_not_believed() -> None:
    class Short(View):
        short = True

        async def settle(self, outcomes: list[Outcome]) -> list[Verdict]:  # type: ignore[override]
            verdicts = await super().settle(outcomes)
            if len(outcomes) > 1 and Short.short:
                Short.short = False
                return verdicts[:-1]
            return verdicts

    store = Store()
    store.add("noop", 10)
    worker = Worker([noop], queues=[lambda: Short(store)])
    async with serving(worker):
        await worker.watch.until("settled", 10)
    assert len(store.outcomes) == 10
    assert worker.watch.counts["lost"] == 0


async def test_the_password_of_a_queue_url_is_never_shown() -> None:
    worker = Worker([noop], queues=["memory://user:secret@demo"])
    assert [each.address for each in worker._openers] == ["memory://user:***@demo"]


async def test_a_real_queue_is_opened_by_its_url() -> None:
    from tenure import NewJob, open_ledger, open_queue

    url = "memory://runtime-by-url"
    await open_queue(url).submit([NewJob(task="noop", payload=b"{}", job_id="one")])
    assert await Worker([noop], queues=[url], burst=True).serve() == 0
    record = await open_ledger(url).get("one")
    assert record is not None
    assert record.state == "done"
