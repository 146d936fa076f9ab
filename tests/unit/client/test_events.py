"""The reader of events that no journal names goes on after every failure, and not at once."""

import asyncio
from collections.abc import Mapping

import pytest

from tenure.client import events
from tenure.client.events import UnjournaledTail
from tenure.core.errors import ServerError, StoreUnreachable
from tenure.core.job import JobEvent


class Refusing:
    """A ledger one of whose streams is of the wrong type."""

    def __init__(self) -> None:
        self.waits = 0
        self.waited_twice = asyncio.Event()

    async def wait_changes(
        self, cursors: Mapping[str, str], *, wait_ms: int
    ) -> dict[str, list[JobEvent]]:
        self.waits += 1
        if self.waits == 2:
            self.waited_twice.set()
        await asyncio.sleep(0)
        raise ServerError("WRONGTYPE", reply="WRONGTYPE")

    async def interrupt(self) -> None: ...

    async def has_foreign_workers(self) -> bool:
        return False


def tail_of(ledger: Refusing, error: Exception | None) -> UnjournaledTail:
    async def read(job_ids: list[str]) -> None:
        if error is not None:
            raise error

    return UnjournaledTail(
        ledger,
        cursors=lambda most: {"j": "0-0"},
        deliver=lambda *news: asyncio.sleep(0),
        read=read,
    )


@pytest.mark.parametrize("error", [StoreUnreachable("away"), ServerError("no"), ValueError("odd")])
async def test_a_failed_search_for_the_bad_stream_does_not_end_the_reader(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "AWAY_S", 0.01)
    ledger = Refusing()
    running = asyncio.create_task(tail_of(ledger, error).run())
    await asyncio.wait_for(ledger.waited_twice.wait(), 5)
    assert not running.done()
    running.cancel()


async def test_a_stream_that_stays_unreadable_does_not_make_the_reader_spin() -> None:
    ledger = Refusing()
    running = asyncio.create_task(tail_of(ledger, None).run())
    await asyncio.sleep(events.AWAY_S / 2)
    assert ledger.waits == 1
    running.cancel()
