"""What only the memory contract has: one store for all of a process that name it."""

import asyncio
import itertools
import threading

import pytest

from tenure.contracts.memory import clock_ms, forget
from tenure.core.errors import UsageError
from tenure.core.job import NewJob
from tenure.core.lease import Lease
from tenure.core.outcome import COMPLETED, Outcome
from tenure.core.registry import open_journal, open_ledger, open_queue

pytestmark = pytest.mark.clause("M-1")
_names = itertools.count(1)


@pytest.fixture
def name() -> str:
    return f"sharing-{next(_names)}"


JOB = NewJob(task="work", payload=b"{}")


async def test_the_same_name_is_the_same_queue_and_another_is_not(name: str) -> None:
    await open_queue(f"memory://{name}").submit([JOB])
    assert (await open_ledger(f"memory://{name}").counts()).states["waiting"] == 1
    assert (await open_ledger(f"memory://{name}-b").counts()).states["waiting"] == 0


async def test_options_may_be_given_by_any_url_of_the_queue(name: str) -> None:
    ledger = open_ledger(f"memory://{name}")
    queue = open_queue(f"memory://{name}?lease_ms=1234&max_attempts=7")
    await queue.submit([JOB])
    (lease,) = await queue.claim(1, wait_ms=0)
    assert (lease.lease_ms, lease.max_attempts) == (1234, 7)
    assert (await ledger.counts()).states["running"] == 1


async def test_two_urls_may_not_contradict_each_other(name: str) -> None:
    open_queue(f"memory://{name}?lease_ms=1000")
    open_queue(f"memory://{name}?lease_ms=1000&max_attempts=2")
    with pytest.raises(UsageError, match="is open with lease_ms=1000"):
        open_queue(f"memory://{name}?lease_ms=2000")


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("leasems=5", "did you mean 'lease_ms'"),
        ("colour=red", "memory does not know"),
        ("lease_ms=0", "lease_ms is at least 1"),
        ("max_attempts=0", "max_attempts is at least 1"),
        ("lease_ms=soon", "lease_ms"),
    ],
)
async def test_a_wrong_option_is_refused_with_what_would_be_right(
    name: str, query: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        open_queue(f"memory://{name}?{query}")


async def test_a_forgotten_queue_begins_anew(name: str) -> None:
    await open_queue(f"memory://{name}").submit([JOB])
    forget(name)
    assert (await open_ledger(f"memory://{name}").counts()).states["waiting"] == 0


async def test_a_keeper_in_another_thread_extends_with_its_own_instance(name: str) -> None:
    queue = open_queue(f"memory://{name}?lease_ms=300", worker_id="w1")
    await queue.submit([JOB])
    (lease,) = await queue.claim(1, wait_ms=0)
    answers: list[object] = []

    async def keep() -> None:
        keeper = open_queue(f"memory://{name}", worker_id="w1")
        answers.extend(await keeper.extend([lease]))
        await keeper.close()

    await asyncio.to_thread(lambda: asyncio.run(keep()))
    assert isinstance(answers[0], Lease)
    assert await queue.settle([Outcome(lease, "complete")]) == [COMPLETED]


async def test_a_claim_that_waits_is_woken_from_another_thread(name: str) -> None:
    queue = open_queue(f"memory://{name}", worker_id="w1")
    waiting = asyncio.create_task(queue.claim(1, wait_ms=30_000))
    await asyncio.sleep(0)

    def submit_there() -> None:
        asyncio.run(open_queue(f"memory://{name}").submit([JOB]))  # type: ignore[arg-type]

    thread = threading.Thread(target=submit_there)
    thread.start()
    (lease,) = await asyncio.wait_for(waiting, 5)
    thread.join()
    assert lease.task == "work"


async def test_many_threads_never_share_a_lease(name: str) -> None:
    await open_queue(f"memory://{name}").submit([JOB] * 300)
    taken: list[str] = []

    async def work(worker_id: str) -> None:
        queue = open_queue(f"memory://{name}", worker_id=worker_id)
        while leases := await queue.claim(7, wait_ms=0):
            taken.extend(lease.job_id for lease in leases)
            await queue.settle([Outcome(lease, "complete") for lease in leases])

    threads = [
        threading.Thread(target=lambda n=n: asyncio.run(work(f"w{n}")))  # type: ignore[misc]
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    assert len(taken) == len(set(taken)) == 300


async def test_waiting_in_a_loop_that_is_gone_disturbs_nobody(name: str) -> None:
    def waits_and_dies() -> None:
        async def wait() -> None:
            task = asyncio.create_task(open_queue(f"memory://{name}").claim(1, wait_ms=60_000))
            await asyncio.sleep(0)
            task.cancel()

        asyncio.run(wait())

    await asyncio.to_thread(waits_and_dies)
    queue = open_queue(f"memory://{name}", worker_id="w1")
    await queue.submit([JOB])
    assert len(await queue.claim(1, wait_ms=0)) == 1


async def test_time_alone_wakes_a_waiting_claim(name: str) -> None:
    """A due job and a lease that runs out need no call to be noticed."""
    queue, rival = open_queue(f"memory://{name}?lease_ms=60"), open_queue(f"memory://{name}")
    await queue.submit([NewJob(task="work", payload=b"{}", delay_ms=40)])
    (lease,) = await asyncio.wait_for(queue.claim(1, wait_ms=30_000), 5)
    (again,) = await asyncio.wait_for(rival.claim(1, wait_ms=30_000), 5)
    assert (again.job_id, again.fence) == (lease.job_id, 2)


async def test_the_journal_is_trimmed_by_upkeep_and_read_on_from_its_oldest(name: str) -> None:
    queue = open_queue(f"memory://{name}?journal_events_max=5")
    journal = open_journal(f"memory://{name}")
    await queue.submit([JOB] * 8)
    assert (await queue.upkeep()).trimmed == 3
    assert [event.seq for event in await journal.read()] == ["4", "5", "6", "7", "8"]
    assert [event.seq for event in await journal.read(after="6")] == ["7", "8"]


def test_the_clock_never_goes_back() -> None:
    times = [clock_ms() for _ in range(1000)]
    assert times == sorted(times)
