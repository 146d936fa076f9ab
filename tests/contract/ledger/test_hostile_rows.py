"""Another program writes what it likes into the tables: every good job is done all the same.

`TENURE_FUZZ_ROUNDS=2000 bin/test tests/contract/ledger/test_hostile_rows.py` for more rounds.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

from tenure.cli.project import migrated
from tenure.core.errors import LeaseLost
from tenure.core.job import NewJob
from tenure.core.journal import JournalEvent
from tenure.core.outcome import Failure, Outcome
from tenure.core.registry import open_journal, open_ledger, open_queue, parse_url
from tenure.core.seam import Query
from tests.contract.adapters import Servers
from tests.waiting import until

ROUNDS = int(os.environ.get("TENURE_FUZZ_ROUNDS", "200"))
COUNT_MAX, EVENTS_MAX, WIDE_MAX = 10**9, 100_000, 2**60
BOUNDS = (COUNT_MAX, EVENTS_MAX, WIDE_MAX, -WIDE_MAX)
NUMBERS = (
    *("9223372036854775807", "-9223372036854775808", "2147483647", "-1", "0", "7"),
    *(str(bound) for bound in BOUNDS),
    *(str(bound - 1) for bound in BOUNDS),
)
TEXTS = ("''", "'{'", "'1e999'", "'\u2028\U0001f4a5'", "repeat('[', 5000)", "'null'")
BROKEN = ("CAST(x'ff' AS TEXT)", "CAST(x'6100ff' AS TEXT)", "char(0)", "CAST(x'eda080' AS TEXT)")
NUMERIC = (
    *("attempt_count", "max_attempts", "ver", "claim_version", "lost_count", "event_count"),
    *("priority", "due_ms", "created_ms", "updated_ms", "expires_ms", "lease_expires_at"),
    *("claimed_ms", "heartbeat_at", "credential_version"),
)
TEXTUAL = (
    *("payload", "task", "result", "error", "progress", "gid", "trace", "requester_id"),
    *("worker_id", "status_webhook_url", "lease_token_h", "status", "passed", "payload_h"),
)
TABLES = {"inbox": "inbox_jobs", "plane": "plane_jobs"}


@dataclass
class Victim:
    """A queue, and a way round it."""

    url: str
    table: str
    outbox: str
    texts: tuple[str, ...]
    execute: Callable[[str], Awaitable[None]]

    async def spoil(self, job_id: str, column: str, value: str) -> bool:
        """Write a value into a job's row; False when the database refuses it."""
        try:
            await self.execute(
                f"UPDATE {self.table} SET {column} = {value} WHERE job_id = '{job_id}'"
            )
        except (sqlite3.Error, asyncpg.PostgresError):
            return False
        return True


@pytest.fixture(params=["sqlite", "postgres"])
async def victim(
    request: pytest.FixtureRequest, contract: str, tmp_path: Path, servers: Servers
) -> AsyncGenerator[Victim]:
    options = "lease_ms=300&retry_delay_ms=1&synchronous=normal"
    table = TABLES[contract]
    if request.param == "sqlite":
        path = tmp_path / "jobs.db"
        url = f"{contract}+sqlite:///{path}?{options}"
        queue = open_queue(url)
        await queue.upkeep()

        async def write(statement: str) -> None:
            file = sqlite3.connect(path, timeout=30)
            file.create_function("repeat", 2, lambda text, count: text * count)
            with file:
                file.execute(statement)
            file.close()

        yield Victim(url, table, "job_outbox_events", TEXTS + BROKEN, write)
        await queue.close()
        return
    schema = f"hostile_{secrets.token_hex(4)}"
    server = servers.postgres()
    url = f"{contract}+{server}{'&' if '?' in server else '?'}schema={schema}&{options}"
    await migrated(parse_url(url))
    connection = await asyncpg.connect(server)

    async def execute(statement: str) -> None:
        await connection.execute(statement.replace(table, f"{schema}.{table}"))

    yield Victim(url, table, f"{schema}.job_outbox_events", TEXTS, execute)
    await connection.close()


class Flow:
    """Good jobs that are worked on, beside bad ones that end in some way."""

    def __init__(self, url: str, contract: str) -> None:
        self.chance = random.Random(17)
        self.queue, self.ledger = open_queue(url, worker_id="w"), open_ledger(url)
        self.journal = open_journal(url)
        self.told = {"status_webhook_url": "https://r.example/"} if contract == "inbox" else {}
        self.good: set[str] = set()
        self.done: set[str] = set()

    async def submit(self, number: int) -> str:
        """Two good jobs and a bad one between them, whose id is returned."""
        ids = [f"good-{number}-a", f"bad-{number}", f"good-{number}-b"]
        await self.queue.submit(
            [NewJob(task="t", payload=b'{"n":1}', job_id=each, options=self.told) for each in ids]
        )
        self.good |= {ids[0], ids[2]}
        return ids[1]

    async def work(self) -> None:
        leases = await self.queue.claim(4, wait_ms=0)
        if leases and self.chance.random() < 0.2:
            await self.queue.extend(leases)
        for lease in leases:
            end = Outcome(lease, "complete", b"1")
            if lease.job_id.startswith("bad") and self.chance.random() < 0.5:
                end = Outcome(lease, "fail", failure=Failure(code="e", message="m"))
            await self.queue.settle([end])
            self.done.add(lease.job_id)

    async def look(self, job_id: str) -> None:
        """All that reads."""
        await self.queue.upkeep()
        await self.ledger.find(Query(limit=100))
        await self.ledger.counts()
        await self.ledger.get(job_id)
        await self.ledger.events(job_id)
        await self.journal.read(limit=50)

    async def all_done(self) -> bool:
        await self.queue.upkeep()
        await self.work()
        return self.good <= self.done

    async def close(self) -> None:
        for each in (self.queue, self.ledger, self.journal):
            await each.close()


@pytest.mark.parametrize("contract", ["inbox", "plane"])
async def test_good_jobs_are_done_whatever_another_program_writes_into_their_neighbours(
    victim: Victim, contract: str
) -> None:
    flow, spoilt = Flow(victim.url, contract), 0
    for number in range(ROUNDS):
        bad = await flow.submit(number)
        if flow.chance.random() < 0.5:
            await flow.work()
        if flow.chance.random() < 0.5:
            column, value = flow.chance.choice(NUMERIC), flow.chance.choice(NUMBERS)
        else:
            column, value = flow.chance.choice(TEXTUAL), flow.chance.choice(victim.texts)
        spoilt += await victim.spoil(bad, column, value)
        await flow.work()
        if number % 10 == 0:
            await flow.look(bad)
    await until(flow.all_done)
    assert spoilt > ROUNDS / 3
    await flow.close()


@pytest.mark.parametrize("contract", ["inbox", "plane"])
@pytest.mark.parametrize("column", ["payload", "task", "gid", "trace"])
async def test_a_job_with_bytes_that_are_no_text_is_a_dead_letter_with_the_reason(
    contract: str, column: str, tmp_path: Path
) -> None:
    queue_url = f"{contract}+sqlite:///{tmp_path}/jobs.db"
    queue, ledger = open_queue(queue_url), open_ledger(queue_url)
    await queue.submit([NewJob(task="t", payload=b"{}", job_id=name) for name in ("bad", "good")])
    with sqlite3.connect(tmp_path / "jobs.db") as file:
        file.execute(
            f"UPDATE {TABLES[contract]} SET {column} = CAST(x'ff' || 'CANARY' AS TEXT) "
            "WHERE job_id = 'bad'"
        )
    assert [lease.job_id for lease in await queue.claim(1, wait_ms=0)] == ["good"]
    bad = await _get(ledger, "bad")
    assert bad.state in ("dead_letter", "DLQ")
    assert b"unreadable" in bad.error
    assert f"column {column} is not UTF-8".encode() in bad.error
    assert b"CANARY" not in bad.error  # those read it who may not read the payload
    assert [record.job_id for record in queue.features.take_quarantined()] == ["bad"]
    await queue.close()
    await ledger.close()


@pytest.mark.parametrize("contract", ["plane"])
async def test_a_payload_that_is_no_json_is_a_dead_letter_of_the_plane(
    victim: Victim, contract: str
) -> None:
    queue, ledger = open_queue(victim.url), open_ledger(victim.url)
    await queue.submit([NewJob(task="t", payload=b"{}", job_id=name) for name in ("bad", "good")])
    assert await victim.spoil("bad", "payload", "'{\"a\":'")
    assert [lease.job_id for lease in await queue.claim(5, wait_ms=0)] == ["good"]
    bad = await _get(ledger, "bad")
    assert bad.state == "DLQ"
    assert b"the payload is not JSON" in bad.error
    await queue.close()
    await ledger.close()


@pytest.mark.parametrize("contract", ["inbox", "plane"])
@pytest.mark.parametrize("column", ["attempt_count", "ver", "claim_version", "lost_count"])
async def test_a_number_at_the_end_of_its_range_is_refused_by_the_database(
    victim: Victim, contract: str, column: str
) -> None:
    queue = open_queue(victim.url)
    await queue.submit([NewJob(task="t", payload=b"{}", job_id="bad")])
    assert not await victim.spoil("bad", column, "2147483647000000000")
    assert not await victim.spoil("bad", column, "-1")
    assert len(await queue.claim(5, wait_ms=0)) == 1
    await queue.close()


@pytest.mark.parametrize("contract", ["inbox", "plane"])
@pytest.mark.parametrize(
    ("column", "bound"),
    [
        *(("attempt_count", COUNT_MAX), ("lost_count", COUNT_MAX), ("event_count", EVENTS_MAX)),
        *(("ver", WIDE_MAX), ("expires_ms", WIDE_MAX), ("created_ms", -WIDE_MAX)),
    ],
)
async def test_a_row_at_the_bound_is_claimed_taken_back_and_ended_like_its_neighbours(
    victim: Victim, contract: str, column: str, bound: int
) -> None:
    flow = Flow(victim.url, contract)
    bad = await flow.submit(1)
    assert await victim.spoil(bad, "max_attempts", str(2 * COUNT_MAX))
    assert await victim.spoil(bad, column, str(bound))
    assert len(await flow.queue.claim(5, wait_ms=0)) == 3

    async def taken_back() -> bool:
        return (await flow.queue.upkeep()).reclaimed > 0

    await until(taken_back)
    leases = await flow.queue.claim(5, wait_ms=0)
    assert {lease.job_id for lease in leases} >= flow.good
    ends = [Outcome(each, "fail", failure=Failure(code="e", message="m")) for each in leases]
    await flow.queue.settle(ends)
    await until(flow.all_done)
    await flow.close()


@pytest.mark.parametrize("contract", ["inbox", "plane"])
async def test_a_job_whose_starts_were_set_to_none_can_be_put_off(
    victim: Victim, contract: str
) -> None:
    queue = open_queue(victim.url)
    await queue.submit([NewJob(task="t", payload=b"{}", job_id="bad")])
    (lease,) = await queue.claim(1, wait_ms=0)
    assert await victim.spoil("bad", "attempt_count", "0")
    await queue.settle([Outcome(lease, "release")])
    assert len(await queue.claim(1, wait_ms=0)) == 1
    await queue.close()


@pytest.mark.parametrize("contract", ["inbox", "plane"])
async def test_a_time_too_far_ahead_is_refused_at_submit_and_shortened_at_the_end_of_a_lease(
    victim: Victim, contract: str
) -> None:
    queue = open_queue(victim.url)
    far = 2**61
    answers = await queue.submit(
        [
            NewJob(task="t", payload=b"{}", delay_ms=far),
            NewJob(task="t", payload=b"{}", ttl_ms=far),
            NewJob(task="t", payload=b"{}", job_id="a"),
            NewJob(task="t", payload=b"{}", job_id="b"),
        ]
    )
    assert [each.status for each in answers] == ["invalid", "invalid", "created", "created"]
    assert str(2**53) in answers[0].reason
    first, second = await queue.claim(2, wait_ms=0)
    ends = [Outcome(first, "complete", b"1"), Outcome(second, "retry", delay_ms=far)]
    assert [type(each).__name__ for each in await queue.settle(ends)] == ["Completed", "Retried"]
    await queue.close()


@pytest.mark.parametrize("contract", ["inbox"])
async def test_a_failed_job_whose_step_is_refused_does_not_keep_its_neighbours(
    contract: str, tmp_path: Path
) -> None:
    url = f"inbox+sqlite:///{tmp_path}/jobs.db?lease_ms=300"
    queue, ledger = open_queue(url), open_ledger(url)
    await queue.submit([NewJob(task="t", payload=b"{}", job_id=name) for name in ("bad", "good")])
    await queue.claim(2, wait_ms=0)
    with sqlite3.connect(tmp_path / "jobs.db") as file:
        file.execute("UPDATE inbox_jobs SET status = 'failed', due_ms = -1, lease_expires_at = 0")
        file.execute(
            "CREATE TRIGGER no BEFORE UPDATE ON inbox_jobs WHEN NEW.job_id = 'bad'"
            " BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
    await queue.upkeep()
    assert (await _get(ledger, "good")).state == "dead_letter"
    await queue.close()
    await ledger.close()


@pytest.mark.parametrize("contract", ["inbox"])
async def test_a_job_or_event_with_a_high_number_does_not_slow_claims(
    victim: Victim, contract: str
) -> None:
    flow = Flow(victim.url, contract)
    bad = await flow.submit(1)
    assert not await victim.spoil(bad, "event_count", str(EVENTS_MAX + 1))
    assert await victim.spoil(bad, "event_count", str(EVENTS_MAX))
    async with asyncio.timeout(5):
        assert len(await flow.queue.claim(3, wait_ms=0)) == 3
    await victim.execute(
        f"INSERT INTO {victim.outbox} (job_id, queue, task, gid, max_attempts, created_ms,"
        " updated_ms, payload, status_webhook_url)"
        " VALUES ('x.900000000', 'inbox/outbox', 'webhook', 'x', 10, 1, 1, '{}', 'https://r')"
    )
    events = open_queue(f"{victim.url}&box=outbox")
    async with asyncio.timeout(5):
        claimed = {lease.job_id for lease in await events.claim(10, wait_ms=0)}
    assert {"x.900000000", "good-1-a.1", "good-1-b.1"} <= claimed
    await events.close()
    await flow.close()


@pytest.mark.parametrize("contract", ["inbox", "plane"])
@pytest.mark.parametrize(
    "name", ["CAST(x'ff' || 'CANARY' AS TEXT)", "CAST(x'6180' AS TEXT)", "'a' || char(0)"]
)
async def test_an_id_that_is_no_text_is_refused_by_sqlite(
    contract: str, name: str, tmp_path: Path
) -> None:
    queue = open_queue(f"{contract}+sqlite:///{tmp_path}/jobs.db")
    await queue.submit([NewJob(task="t", payload=b"{}", job_id="good")])
    table = TABLES[contract]
    with sqlite3.connect(tmp_path / "jobs.db") as file:
        with pytest.raises(sqlite3.IntegrityError, match="job_id"):
            file.execute(f"UPDATE {table} SET job_id = {name}")
        with pytest.raises(sqlite3.IntegrityError, match="job_id"):
            file.execute(
                f"INSERT INTO {table} (job_id, queue, task, max_attempts, created_ms, updated_ms,"
                f" payload) SELECT {name}, queue, task, 3, 1, 1, '{{}}' FROM {table}"
            )
    assert [lease.job_id for lease in await queue.claim(5, wait_ms=0)] == ["good"]
    await queue.close()


async def _get(ledger: Any, job_id: str) -> Any:
    """The job, once what its failure leads to has been decided."""
    record = await ledger.get(job_id)
    assert record is not None
    return record


@pytest.mark.parametrize("contract", ["inbox", "plane"])
@pytest.mark.parametrize("opened", ["before", "after"])
async def test_a_counter_that_another_program_moved_to_its_end_is_set_back(
    victim: Victim, contract: str, opened: str
) -> None:
    flow = Flow(victim.url, contract)
    await flow.submit(1)
    schema, _, _ = victim.outbox.rpartition(".")
    if schema:
        for name in (victim.table, victim.outbox, f"{schema}.job_journal"):
            await victim.execute(f"SELECT setval('{name}_seq_seq', {2**63 - 1})")
    else:
        await victim.execute(f"UPDATE sqlite_sequence SET seq = {2**63 - 1}")
    if opened == "after":
        flow = Flow(victim.url, contract)
    await asyncio.gather(*(flow.submit(number) for number in (2, 3, 4)))
    bulk = [NewJob(task="t", payload=b"{}", job_id=f"bulk-{number}") for number in range(600)]
    await flow.queue.submit(bulk)
    leases = await flow.queue.claim(12, wait_ms=0)
    assert {lease.job_id for lease in leases[:3]} == {"good-1-a", "bad-1", "good-1-b"}
    await flow.queue.settle([Outcome(lease, "complete", b"1") for lease in leases])
    events = [event async for event in everything(flow)]
    assert {event.job_id for event in events} >= {*flow.good, *(job.job_id for job in bulk)}
    assert max(int(event.seq) for event in events) < 2**62


async def everything(flow: Flow) -> AsyncGenerator[JournalEvent]:
    after = ""
    while events := await flow.journal.read(after=after):
        for event in events:
            yield event
        after = events[-1].seq


@pytest.mark.parametrize("contract", ["inbox", "plane"])
async def test_rows_that_were_numbered_beyond_the_bound_follow_the_others_once_the_file_is_opened(
    contract: str, tmp_path: Path
) -> None:
    path = tmp_path / "jobs.db"
    for number, name in enumerate(("first", "beyond", "last")):
        queue = open_queue(f"{contract}+sqlite:///{path}")
        await queue.submit([NewJob(task="t", payload=b"{}", job_id=name)])
        if number == 0:
            with sqlite3.connect(path) as file:
                file.execute(f"UPDATE sqlite_sequence SET seq = {2**62 + 5}")
            file.close()
            await queue.submit([NewJob(task="t", payload=b"{}", job_id="between")])
        elif number == 1:
            with sqlite3.connect(path) as file:
                found = file.execute("SELECT max(seq) FROM sqlite_sequence").fetchone()[0]
            file.close()
            assert found < 2**62
        else:
            leases = await queue.claim(9, wait_ms=0)
            names = [lease.job_id for lease in leases]
            assert names == ["first", "between", "beyond", "last"]
        await queue.close()


async def test_events_of_a_job_cost_the_same_beside_a_long_history(tmp_path: Path) -> None:
    """On SQLite each of these reads scanned the whole history and stalled the store."""
    url = f"inbox+sqlite:///{tmp_path / 'jobs.db'}"
    queue, ledger = open_queue(url), open_ledger(url)
    (made,) = await queue.submit([NewJob(task="work", payload=b"{}")])
    with sqlite3.connect(tmp_path / "jobs.db") as database:
        (name,) = database.execute("SELECT queue FROM job_journal LIMIT 1").fetchone()
        database.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000) "
            "INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task) "
            "SELECT ?, 'j' || i, 1, 'submit', 1, 'work' FROM n",
            (name,),
        )
    begun = time.process_time()
    for _ in range(20):
        assert len(await ledger.events(made.job_id)) == 1
    assert time.process_time() - begun < 0.4  # it was 60 ms for each
    await queue.close()
    await ledger.close()


@pytest.mark.parametrize("contract", ["inbox"])
async def test_refusals_of_made_up_jobs_leave_no_rows(victim: Victim) -> None:
    queue, journal = open_queue(victim.url), open_journal(victim.url)
    await queue.submit([NewJob(task="work", payload=b"{}")])
    (lease,) = await queue.claim(1, wait_ms=0)
    made_up = [msgspec.structs.replace(lease, job_id=f"no-{n}") for n in range(3)]
    stale = msgspec.structs.replace(lease, fence=lease.fence + 7)
    verdicts = await queue.settle([Outcome(each, "complete") for each in [*made_up, stale]])
    assert all(isinstance(verdict, LeaseLost) for verdict in verdicts)
    events = await journal.read()
    assert [event.job_id for event in events if event.type == "reject"] == [lease.job_id]
    await queue.close()
    await journal.close()
