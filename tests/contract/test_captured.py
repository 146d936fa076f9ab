"""Journals in Redis wait for whoever captures them, up to a limit, before they are trimmed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tenure.core.job import NewJob
from tenure.core.journal import StreamFormat
from tenure.core.outcome import Outcome
from tenure.core.registry import journal_format, open_queue
from tenure.store.redis import BulkRedis
from tests.contract.adapters import Servers

ENTRIES = 220
URLS = {
    "streams": "streams+{}?namespace=captured{}:",
    "bullmq": "bullmq+{}?queue=captured{}",
    "omniq": "omniq+{}?queue=captured{}",
}


class Journal:
    """One journal, its store, and the mark that a capture leaves there."""

    def __init__(self, url: str) -> None:
        self.url = url
        fmt = journal_format(url)
        assert isinstance(fmt, StreamFormat)
        self._format = fmt
        self._redis = BulkRedis(fmt.store)

    def captured(self, upto: str) -> None:
        key, field = self._format.captured
        if upto:
            self._redis.call("HSET", key, field, upto)
        else:
            self._redis.call("HDEL", key, field)

    def ids(self) -> list[str]:
        return [
            entry[0].decode() for entry in self._redis.call("XRANGE", self._format.key, "-", "+")
        ]

    def bytes(self) -> int:
        return int(self._redis.call("MEMORY", "USAGE", self._format.key, "SAMPLES", 0))

    async def trim(self, options: str) -> int:
        """Upkeep now, though it tidies only every ten seconds; how many entries are left."""
        self._redis.call("HDEL", self._format.captured[0], "tidy_at")
        queue = open_queue(f"{self.url}&{options}", worker_id="w")
        try:
            await queue.upkeep()
        finally:
            await queue.close()
        return len(self.ids())

    def close(self) -> None:
        self._redis.close()


@pytest.fixture(
    params=[
        pytest.param("streams", marks=pytest.mark.clause("S-30")),
        pytest.param("bullmq", marks=pytest.mark.clause("B-47")),
        pytest.param("omniq", marks=pytest.mark.clause("O-39")),
    ]
)
def journal(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Journal]:
    made = Journal(URLS[request.param].format(servers.redis(), f"{os.getpid()}-{id(request)}"))
    yield made
    made.close()


async def test_what_was_not_captured_stays_until_it_is_older_than_the_limit(
    journal: Journal,
) -> None:
    queue = open_queue(journal.url, worker_id="w")
    for n in range(ENTRIES):
        await queue.submit([NewJob(task="t", payload=b"{}", job_id=f"c{n}")])
    await queue.close()
    assert len(journal.ids()) == ENTRIES
    short, old = "journal_bytes=1", "journal_days=0.0000001"
    journal.captured("0")
    assert await journal.trim(short) == await journal.trim(old) == ENTRIES
    journal.captured(journal.ids()[150])
    left = await journal.trim(old)
    assert ENTRIES - 150 <= left < ENTRIES, "whole nodes of the stream go, and none unread"
    assert await journal.trim(f"{old}&unread_days=1") == left
    assert await journal.trim(f"{old}&unread_days=0.0000001") < left


async def test_a_journal_of_batches_is_bounded_by_its_bytes(journal: Journal) -> None:
    """An entry holds up to a hundred events, so a number of entries would bound nothing."""
    queue = open_queue(journal.url, worker_id="w")
    for batch in range(8):
        jobs = [NewJob(task="t", payload=b"{}", job_id=f"b{batch}-{n}") for n in range(500)]
        await queue.submit(jobs)
        leases = await queue.claim(500, wait_ms=1_000)
        await queue.settle([Outcome(lease, "complete") for lease in leases])
    await queue.close()
    whole = journal.bytes()
    assert 15 < whole / 4_000 < 600, "docs/operating/durability.md says what a job costs"
    await journal.trim(f"journal_bytes={whole // 2}")
    assert 0.25 * whole < journal.bytes() < 0.6 * whole
