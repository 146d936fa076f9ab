"""The same statements through the libsql client, on the file that SQLite's own reads too."""

import platform
import sqlite3
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tenure.contracts.inbox.queue import InboxQueue
from tenure.core.errors import LeaseLost, UsageError
from tenure.core.job import NewJob
from tenure.core.outcome import COMPLETED, Outcome
from tenure.core.registry import open_ledger, open_queue
from tenure.store.sqlite import LibsqlConnection
from tests.contract.suite.acting import FAILURE, claim, claim_one, job, settle, submit

pytestmark = [
    pytest.mark.clause("I-40"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="libsql has wheels for x86_64 alone"),
]


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncGenerator[InboxQueue]:
    made = open_queue(f"inbox+libsql:///{tmp_path}/jobs.db?lease_ms=300&synchronous=normal")
    assert isinstance(made, InboxQueue)
    yield made
    await made.close()


async def test_a_job_lives_its_life_and_sqlite_reads_it_afterwards(
    queue: InboxQueue, tmp_path: Path
) -> None:
    hook = {"status_webhook_url": "https://r.example/h", "storage_creds_encrypted": b"\0\xff"}
    await submit(queue, job("a", options=hook), job("b", max_attempts=1), job("c", delay_ms=1))
    leases = {lease.job_id: lease for lease in await claim(queue, 3)}
    assert {lease.fence for lease in leases.values()} == {1}
    assert await settle(queue, leases["a"], "complete", result=b"[1]") is COMPLETED
    await settle(queue, leases["b"], "fail", failure=FAILURE)
    (kept,) = await queue.extend([leases["c"]])
    assert not isinstance(kept, LeaseLost)
    await queue.close()
    url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    ledger, outbox = open_ledger(url), open_ledger(f"{url}?box=outbox")
    states = (await ledger.counts()).states
    record = await ledger.get("a")
    events = (await outbox.counts()).states["queued"]
    await ledger.close()
    await outbox.close()
    assert (states["succeeded"], states["dead_letter"], states["claimed"]) == (1, 1, 1)
    assert record is not None
    assert record.result == b"[1]"
    assert isinstance(record.created_ms, int)
    assert events == 2


async def test_a_repetition_a_conflict_and_a_stale_write_are_told(queue: InboxQueue) -> None:
    await submit(queue, job("a", idempotency_key="k"))
    again, other = await queue.submit(
        [job("a", idempotency_key="k"), job("a", payload=b"[]", idempotency_key="k2")]
    )
    assert (again.status, other.status) == ("replayed", "conflict")
    stale = await claim_one(queue)
    current = await claim_one(queue)  # after the lease ran out
    assert current.fence == stale.fence + 1
    (verdict,) = await queue.settle([Outcome(stale, "complete")])
    assert isinstance(verdict, LeaseLost)
    assert await settle(queue, current, "complete") is COMPLETED


async def test_the_database_refuses_a_step_outside_the_table(
    queue: InboxQueue, tmp_path: Path
) -> None:
    await submit(queue, job("a"))
    await queue.close()
    file = LibsqlConnection(tmp_path / "jobs.db", 1_000)
    with pytest.raises(sqlite3.IntegrityError, match="transition"):
        file.execute("UPDATE inbox_jobs SET status = 'succeeded'")
    file.close()


async def test_one_process_keeps_to_one_client(queue: InboxQueue, tmp_path: Path) -> None:
    await submit(queue, job("a"))
    other = open_queue(f"inbox+sqlite:///{tmp_path}/jobs.db")
    with pytest.raises(UsageError, match="use one for all"):
        await other.submit([NewJob(task="t", payload=b"{}")])
    await other.close()


async def test_without_the_client_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "libsql", None)
    made = open_queue(f"inbox+libsql:///{tmp_path}/none.db")
    with pytest.raises(UsageError, match=r"tenure\[libsql\]"):
        await made.submit([NewJob(task="t", payload=b"{}")])
    await made.close()
