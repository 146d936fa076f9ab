"""A wake-up that its receiver cannot use reaches the next one who waits, on one SQLite file."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tenure.contracts.plane import claims
from tenure.core.job import NewJob
from tenure.core.lease import Lease
from tenure.core.registry import open_ledger, open_queue
from tenure.sql import claim, sqlite_engine
from tenure.store import sqlite
from tenure.store.file_notifier import Listener, notify
from tenure.store.sqlite import PIPES_SUFFIX
from tests.waiting import until

OTHERS = 9
NEVER_MS = (60_000, 60_000)
WITHIN_S = 10.0


@pytest.fixture(autouse=True)
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a wake-up ends a wait."""
    monkeypatch.setattr(claim, "POLL_MS", NEVER_MS)
    monkeypatch.setattr(claims, "POLL_MS", NEVER_MS)


async def waiting(queue: Any, limit: int) -> asyncio.Task[list[Lease]]:
    """A claim that found nothing and waits."""
    task = asyncio.create_task(queue.claim(limit, wait_ms=60_000))
    await until(lambda: waits(queue))
    return task


def waits(queue: Any) -> bool:
    """A claim of this queue has found nothing."""
    claims = queue._claimer
    listener = claims._listener._listener
    return listener is not None and listener._fd >= 0 and not claims._turn.locked()


async def test_a_claim_that_is_cancelled_after_its_wake_up_passes_it_on(tmp_path: Path) -> None:
    url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    others: list[Any] = [open_queue(url) for _ in range(OTHERS)]
    last = open_queue(url)
    tasks = [await waiting(queue, 1) for queue in others]
    for queue in others:
        await queue._claimer._turn.acquire()  # what wakes now cannot look
    good = await waiting(last, 1)
    await last.submit([NewJob(task="t", payload=b"{}")])
    await asyncio.sleep(0.1)  # the wake-up reaches one of them
    for task in tasks:
        task.cancel()
    async with asyncio.timeout(WITHIN_S):
        assert len(await good) == 1
    await asyncio.gather(*tasks, return_exceptions=True)
    for queue in (*others, last):
        await queue.close()


async def test_a_claimer_that_comes_straight_back_wakes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty jobs of one submit are one wake-up, however many processes wait."""
    url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    woken: list[str] = []

    def counted(folder: Path, topic: str) -> bool:
        woken.append(topic)
        return notify(folder, topic)

    monkeypatch.setattr(sqlite_engine, "notify", counted)
    monkeypatch.setattr(sqlite, "notify", counted)
    queues: list[Any] = [open_queue(url) for _ in range(1 + OTHERS)]
    taken = [0] * len(queues)

    async def work(at: int) -> None:
        limit = 1
        while True:  # as a worker does: one when it was idle, then a batch
            leases = await queues[at].claim(limit, wait_ms=60_000)
            taken[at] += len(leases)
            limit = 5 if len(leases) >= limit else 1

    workers = [asyncio.create_task(work(at)) for at in range(len(queues))]
    await asyncio.gather(*(until(lambda queue=queue: waits(queue)) for queue in queues))
    await queues[0].submit([NewJob(task="t", payload=b"{}")] * 40)
    await until(lambda: sum(taken) == 40)
    assert max(taken) == 40
    assert woken == ["inbox"]
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    for queue in queues:
        await queue.close()


async def test_a_claimer_that_does_not_come_back_passes_its_wake_up_on(tmp_path: Path) -> None:
    url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    queues: list[Any] = [open_queue(url) for _ in range(1 + OTHERS)]
    claims = [await waiting(queue, 1) for queue in queues]
    await queues[0].submit([NewJob(task="t", payload=b"{}")] * len(queues))
    async with asyncio.timeout(WITHIN_S):
        assert [len(leases) for leases in await asyncio.gather(*claims)] == [1] * len(queues)
    for queue in queues:
        await queue.close()


async def test_a_queue_that_is_closed_passes_on_the_wake_up_that_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_engine, "_KEEP_NOTICE_S", 60.0)
    url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    first, second = open_queue(url), open_queue(url)
    claim = await waiting(first, 1)
    await first.submit([NewJob(task="t", payload=b"{}")])
    assert len(await claim) == 1
    again = await waiting(second, 1)
    await second.submit([NewJob(task="t", payload=b"{}")])  # rings for either
    await asyncio.sleep(0.1)  # it reaches one of them
    await first.close()
    async with asyncio.timeout(WITHIN_S):
        assert len(await again) == 1
    await second.close()


async def test_a_claim_with_fewer_jobs_for_unreadable_rows_passes_its_wake_up_on(
    tmp_path: Path,
) -> None:
    path = tmp_path / "jobs.db"
    queues = [open_queue(f"inbox+sqlite:///{path}") for _ in range(2)]
    tasks = [await waiting(queue, 2) for queue in queues]
    with sqlite3.connect(path) as file:
        for name, payload in (("bad", "CAST(x'ff' AS TEXT)"), ("good", "'{}'"), ("next", "'{}'")):
            file.execute(
                "INSERT INTO inbox_jobs (job_id, queue, task, max_attempts, created_ms, updated_ms,"
                f" payload) VALUES ('{name}', 'inbox', 't', 3, 1, 1, {payload})"
            )
    assert notify(path.with_name(path.name + PIPES_SUFFIX), "inbox")
    async with asyncio.timeout(WITHIN_S):
        found = [lease.job_id for leases in await asyncio.gather(*tasks) for lease in leases]
    assert sorted(found) == ["good", "next"]
    for queue in queues:
        await queue.close()


async def test_a_plane_without_waiters_passes_a_wake_up_on(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    lines = [
        claims.Waiters(lambda stream: sqlite_engine.SqliteListener(path, stream))
        for _ in range(OTHERS + 1)
    ]
    waiters = [each.join(("x",)) for each in lines]
    for each, waiter in zip(lines, waiters, strict=True):
        await waiter.woken.wait()  # its first look: the plane listens
        waiter.woken.clear()
        if each is not lines[-1]:
            each.leave(waiter, found=False)
    assert notify(path.with_name(path.name + PIPES_SUFFIX), "x")
    async with asyncio.timeout(WITHIN_S):
        await waiters[-1].woken.wait()
    for each in lines:
        await each.close()


async def test_a_waiter_that_joins_as_the_watch_ends_is_watched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "IDLE_S", 0.02)
    path = tmp_path / "jobs.db"
    met = 0

    async def joins_late() -> bool:
        """Whether the waiter joined in the moment in which the watch timed out."""
        here = claims.Waiters(lambda stream: sqlite_engine.SqliteListener(path, stream))
        first = here.join(("x",))
        await first.woken.wait()
        here.leave(first, found=False)
        notify(
            path.with_name(path.name + PIPES_SUFFIX), "x"
        )  # the watch sees that it has no waiter
        watch = here._watches["x"]
        while not watch.cancelling() and not watch.done():
            await asyncio.sleep(0)
        late = not watch.done()
        second = here.join(("x",))
        async with asyncio.timeout(WITHIN_S):
            await second.woken.wait()
        await here.close()
        return late

    async with asyncio.timeout(4 * WITHIN_S):
        while met < 3:
            met += await joins_late()


async def test_a_probe_of_the_store_wakes_no_waiter(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    ledger: Any = open_ledger(f"inbox+sqlite:///{path}")
    heard = asyncio.Event()
    await ledger.probe()
    listener = Listener(path.with_name(path.name + PIPES_SUFFIX), "inbox", heard.set)
    assert listener.open()
    await ledger.probe()
    await ledger.pause()
    await asyncio.sleep(0)
    assert not listener.close()
    assert not heard.is_set()
    assert listener.open()
    await ledger.resume()
    async with asyncio.timeout(WITHIN_S):
        await heard.wait()
    listener.remove()
    await ledger.close()
