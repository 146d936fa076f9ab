"""What a lake knows of people: payloads on request and without secrets, and their erasure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tenure.cli.console import Exit, run
from tenure.core.errors import UsageError
from tenure.core.job import NewJob
from tenure.core.registry import open_ledger, open_queue
from tenure.pipeline.audit.lakes import audit_lake
from tenure.pipeline.capture import capture
from tenure.pipeline.lake import Lake
from tenure.pipeline.personal import PAYLOADS, TABLES, forget
from tenure.pipeline.tables.update import update_tables
from tests.chaos.sim.test_verdict import sound
from tests.spark.test_audit import append, page
from tests.spark.working import drain, lake_rows, work


async def submitted(url: str, requester: str, job_ids: Sequence[str]) -> None:
    """Jobs of a requester, with an address and a password in each payload."""
    queue = open_queue(url, worker_id="w")
    try:
        payload = json.dumps({"email": f"{requester}@example.org", "password": "hunter2", "n": 1})
        jobs = [
            NewJob(task="mail", payload=payload.encode(), job_id=job_id, requester=requester)
            for job_id in job_ids
        ]
        assert all(answer.accepted for answer in await queue.submit(jobs))
    finally:
        await queue.close()


async def drained(url: str) -> None:
    queue = open_queue(url, worker_id="w")
    await drain(queue, fail_every=3)
    await queue.close()


def payloads(lake: str) -> dict[str, dict[str, object]]:
    return {str(row["job_id"]): row for row in Lake(lake).table(PAYLOADS).rows()}


async def test_payloads_of_ended_jobs_are_kept_once_and_without_secrets(
    spark: SparkSession, lake: str, streams_url: str
) -> None:
    await work(streams_url, 4, prefix="before")
    capture(spark, lake, [streams_url], once=True)
    await submitted(streams_url, "anna", ["a1", "a3"])
    capture(spark, lake, [streams_url], once=True, secrets=["email"])
    assert payloads(lake).keys() == {f"before{n}" for n in range(4)}, "a1 and a3 still wait"
    await drained(streams_url)
    for _ in range(2):
        capture(spark, lake, [streams_url], once=True, secrets=["email"])
    found = payloads(lake)
    assert len(Lake(lake).table(PAYLOADS).rows()) == 6
    assert (found["a1"]["state"], found["a3"]["state"]) == ("done", "error")
    assert json.loads(str(found["a1"]["payload"])) == {"email": "•••", "password": "•••", "n": 1}
    assert found["a1"]["result"] == '{"ok":true}'
    assert "503" in str(found["a3"]["error"])
    assert found["a1"]["requester"] == "anna"
    kept = b"".join(file.read_bytes() for file in Path(lake).rglob("*") if file.is_file())
    assert b"hunter2" not in kept
    assert b"anna@example.org" not in kept


async def test_the_history_of_a_requester_is_erased_from_all_tables_and_files(
    spark: SparkSession, lake: str, streams_url: str
) -> None:
    await submitted(streams_url, "anna", ["a1", "a2", "a3"])
    await submitted(streams_url, "bob", ["b1", "b2", "b3"])
    await drained(streams_url)
    await submitted(streams_url, "anna", ["a-waits"])
    capture(spark, lake, [streams_url], once=True, secrets=[])
    update_tables(spark, lake)
    before = audit_lake(spark, lake)
    done = await asyncio.to_thread(forget, Lake(lake), [], requester="anna")
    assert (done.jobs, done.open_jobs) == (3, 1)
    for name in TABLES:
        rows = Lake(lake).table(name).rows()
        assert {row["job_id"] for row in rows} <= {"b1", "b2", "b3", "a-waits"}, name
        table = Lake(lake).table(name).opened()
        kept = {Path(uri) for uri in table.file_uris()} if table else set()
        assert set((Path(lake) / name).rglob("*.parquet")) == kept, (
            "files with erased rows are gone"
        )
    await the_store_removes(streams_url, ["a1", "b1"])
    await drained(streams_url)
    capture(spark, lake, [streams_url], once=True, secrets=[])
    assert {row["job_id"] for row in lake_rows(lake)} >= {"b1", "b2", "b3", "a-waits"}
    for full in (False, True):
        after = audit_lake(spark, lake, full=full)
        assert after.violations == before.violations == 0, after
    update_tables(spark, lake, scratch=True)
    assert not [row for row in Lake(lake).table("jobs").rows() if row["job_id"] == "a2"]


async def the_store_removes(url: str, job_ids: list[str]) -> None:
    ledger = open_ledger(url)
    try:
        assert await ledger.remove(job_ids) == ["ok"] * len(job_ids)
    finally:
        await ledger.close()


async def test_a_job_is_forgotten_by_its_id_and_only_on_request(
    spark: SparkSession, lake: str, streams_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await work(streams_url, 2)
    capture(spark, lake, [streams_url], once=True)
    command = ["pipeline", "forget", "--lake", lake]
    assert run([*command, "--job", "j0"]) == Exit.USAGE
    assert run([*command, "--yes"]) == Exit.USAGE
    assert len(lake_rows(lake)) == 6
    capsys.readouterr()
    assert run([*command, "--job", "j0", "--yes"]) == Exit.OK
    assert capsys.readouterr().out.startswith("1 jobs erased")
    assert {row["job_id"] for row in lake_rows(lake)} == {"j1"}
    assert forget(Lake(lake), [], job_ids=["j0", "nobody"]).jobs == 0


def test_a_store_that_the_lake_cannot_name_has_to_be_given(lake: str) -> None:
    place = Lake(lake)
    place.begin()
    append(place, page({"old": sound(1).events}), 0)
    with pytest.raises(UsageError, match=r"does not say where old lives.*--queue URL"):
        forget(place, [], requester="anna")
