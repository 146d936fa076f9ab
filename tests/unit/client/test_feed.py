"""The feed by itself: it closes whatever its journal does, and goes on after a lost position."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tenure.client.feed import JobFeed
from tenure.client.follow import EventFollower
from tenure.core.errors import StoreUnreachable
from tenure.core.job import JobEvent, JobRecord
from tenure.core.journal import JournalEvent


class Store:
    """A ledger and a journal of one job that runs until it is told to end."""

    def __init__(self) -> None:
        self.state = "running"
        self.reads = 0
        self.waits = asyncio.Semaphore(0)
        self.away = False

    async def get(self, job_id: str) -> JobRecord | None:
        self.reads += 1
        return JobRecord(job_id=job_id, contract="x", queue="q", task="t", state=self.state)

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        return []

    async def changes(self, cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
        return {}

    async def last(self) -> str:
        if self.away:
            raise StoreUnreachable("away")
        return "1"

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        self.waits.release()
        if self.away:
            raise StoreUnreachable("away")
        await asyncio.Event().wait()
        return []


class Swallowing(Store):
    """As `asyncio.wait_for` of Python 3.11 may: a cancel that comes with the news is lost."""

    swallowed = False

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        try:
            return await super().wait(after=after, wait_ms=wait_ms)
        except asyncio.CancelledError:
            if self.swallowed:
                raise
            self.swallowed = True
            return []


def feed_of(store: Store) -> JobFeed[EventFollower]:
    feed: JobFeed[EventFollower] = JobFeed(store, store, final=("done",))
    feed.start()
    return feed


async def test_a_feed_closes_though_its_journal_loses_a_cancel() -> None:
    store = Swallowing()
    feed = feed_of(store)
    waiting = asyncio.create_task(feed.end_of("j"))
    await store.waits.acquire()
    async with asyncio.timeout(5):
        await feed.close()
    assert store.swallowed
    assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], Exception)


async def test_an_end_while_the_store_was_away_is_found_when_it_is_back() -> None:
    store = Store()
    feed = feed_of(store)
    store.away = True
    waiting = asyncio.create_task(feed.end_of("j"))
    while not store.reads:
        await asyncio.sleep(0.01)  # nothing tells when the record is read
    store.state, store.away = "done", False
    async with asyncio.timeout(10):
        record = await waiting
    assert record is not None
    assert record.state == "done"
    await feed.close()


async def test_a_job_that_nobody_awaits_any_more_is_read_no_more() -> None:
    store = Store()
    feed = feed_of(store)
    waiting = asyncio.create_task(feed.end_of("j"))
    await store.waits.acquire()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not feed._ends
    assert not feed._followed.is_set()
    await feed.close()
