"""Who keeps the history elsewhere is waited for, up to a limit, before it is trimmed."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tenure.contracts.inbox import open_parts
from tenure.core.errors import NotFound
from tenure.core.registry import open_queue, parse_url
from tenure.sql.sql_ledger import JournalReaders
from tests.contract.inbox.conftest import Outbox, RawSql
from tests.contract.inbox_stage import InboxStage
from tests.contract.suite.acting import claim_one, job, settle, submit

pytestmark = [pytest.mark.clause("I-24"), pytest.mark.raw_writes]
AT_ONCE = "journal_days=0.0000001"


@pytest.fixture
async def readers(inbox: InboxStage) -> AsyncGenerator[JournalReaders]:
    engine, options = open_parts(parse_url(inbox.url))
    yield JournalReaders(engine, [options.settings().queue])
    await engine.close()


async def trim(inbox: InboxStage, options: str = AT_ONCE) -> int:
    """Upkeep for which all that happened is too old; how many rows went."""
    await inbox.advance(20)
    queue = open_queue(f"{inbox.url}&{options}", worker_id="trimmer")
    try:
        return (await queue.upkeep()).trimmed
    finally:
        await queue.close()


async def live(inbox: InboxStage, job_id: str) -> int:
    """A job from its beginning to its removal; where its history ends."""
    queue = inbox.queue("w1")
    await submit(queue, job(job_id))
    await settle(queue, await claim_one(queue), "complete")
    await inbox.ledger.remove([job_id])
    return int((await inbox.journal.read())[-1].seq)


async def left(inbox: InboxStage) -> set[str]:
    return {event.job_id for event in await inbox.journal.read()}


async def test_what_was_kept_elsewhere_goes_and_what_was_not_stays(
    inbox: InboxStage, readers: JournalReaders
) -> None:
    kept = await live(inbox, "kept")
    await live(inbox, "unread")
    await readers.note("lake", kept)
    assert await trim(inbox) == 4
    assert await left(inbox) == {"unread"}
    assert await trim(inbox) == 0, "age alone is not enough"
    await readers.note("lake", kept + 4)
    assert await trim(inbox) == 4


async def test_a_reader_that_has_read_nothing_yet_is_waited_for(
    inbox: InboxStage, readers: JournalReaders
) -> None:
    await live(inbox, "unread")
    await readers.note("lake", 0)
    assert await trim(inbox) == 0


async def test_the_slowest_reader_is_waited_for_until_it_is_forgotten(
    inbox: InboxStage, readers: JournalReaders
) -> None:
    first, second = await live(inbox, "first"), await live(inbox, "second")
    await readers.note("slow", first)
    await readers.note("quick", second)
    await trim(inbox)
    assert await left(inbox) == {"second"}
    assert [(reader.name, reader.position) for reader in await readers.all()] == [
        ("quick", second),
        ("slow", first),
    ]
    await readers.forget("slow")
    await trim(inbox)
    assert await left(inbox) == set()


async def test_a_reader_that_nobody_knows_is_not_forgotten_in_silence(
    readers: JournalReaders,
) -> None:
    with pytest.raises(NotFound, match="lake-2 is no reader of this journal; nobody captures it"):
        await readers.forget("lake-2")
    await readers.note("lake-1", 0)
    with pytest.raises(NotFound, match="it has lake-1"):
        await readers.forget("lake-2")


async def test_nobody_is_waited_for_longer_than_the_limit(
    inbox: InboxStage, readers: JournalReaders
) -> None:
    await live(inbox, "unread")
    await readers.note("away", 0)
    assert await trim(inbox, f"{AT_ONCE}&unread_days=1") == 0
    assert await trim(inbox, f"{AT_ONCE}&unread_days=0.0000001") == 4
    await live(inbox, "unread-too")
    assert await trim(inbox, "unread_days=0") == 0, "the limit is at least the age"


async def test_a_reader_of_another_queue_holds_nothing_back(
    inbox: InboxStage, readers: JournalReaders
) -> None:
    await live(inbox, "mine")
    other = JournalReaders(readers._engine, ["another"])
    await other.note("lake", 0)
    assert await trim(inbox) == 4
    await other.forget("lake")


async def test_a_step_that_an_event_tells_of_waits_for_the_readers_of_both(
    inbox: InboxStage, outbox: Outbox, readers: JournalReaders
) -> None:
    queue = inbox.queue("w1")
    await submit(queue, job("told", options={"status_webhook_url": "https://hooks.test/told"}))
    await settle(queue, await claim_one(queue), "complete")
    await inbox.ledger.remove(["told"])
    await outbox.ledger.remove(["told.1", "told.2"])
    end = int((await inbox.journal.read())[-1].seq)
    of_events = JournalReaders(readers._engine, [f"{readers._queues[0]}/outbox"])
    await readers.note("lake", end)
    await of_events.note("lake", 0)
    assert await trim(inbox) == 2, "the submit and the removal, which no event told of"
    assert [event.job_id for event in await outbox.history() if event.type == "submit"] == [
        "told.1",
        "told.2",
    ]
    await of_events.note("lake", end)
    assert await trim(inbox) == 2


async def test_long_histories_are_trimmed_exactly_up_to_the_reader(
    inbox: InboxStage, readers: JournalReaders, sql: RawSql
) -> None:
    queue = readers._queues[0]
    await readers.note("lake", 0)
    await sql(
        "INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, to_state)"
        " WITH RECURSIVE many(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM many WHERE n < 3500)"
        f" SELECT '{queue}', 'long', n + 1, 'extend', 1000 + n, 't', 'claimed' FROM many"
    )
    seqs = [int(event.seq) for event in await inbox.journal.read(limit=5_000)]
    await readers.note("lake", seqs[1_499])
    for expected in (1_500, 0, 0):
        assert await trim(inbox, "unread_days=100000") == expected
    assert await trim(inbox) == 2_000, "its rows are older than any limit"
