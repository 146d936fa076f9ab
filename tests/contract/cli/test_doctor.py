"""`tenure doctor` and `tenure bench` on real servers, good ones and bad ones."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tenure.cli.doctor import server_findings
from tenure.core.job import NewJob
from tenure.core.registry import open_queue
from tenure.store.embedded import EmbeddedRedis
from tenure.store.redis import Redis
from tests.contract.cli.conftest import Cli, Said, Start, wait_until


def by_check(said: Said) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in said.lines}


@pytest.fixture
def own_redis() -> Iterator[str]:
    """A server that the test may spoil."""
    server = EmbeddedRedis()
    try:
        yield server.start()
    finally:
        server.stop()


def ask(url: str, *command: str | int) -> Any:
    async def asked() -> Any:
        redis = Redis(url)
        try:
            return await redis.call(*command)
        finally:
            await redis.close()

    return asyncio.run(asked())


def test_a_good_store_has_no_problem(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("TENURE_GATEWAY_PORT", str(free_port))
    said = cli("doctor", "--json")
    assert said.code == 0, said.out
    found = by_check(said)
    assert {"python", "reachable", "redis version", "append-only file", "eviction"} <= set(found)
    assert {finding["level"] for finding in found.values()} <= {"ok", "note"}
    text = cli("doctor")
    assert (text.code, "PROBLEM" in text.out) == (0, False)


def test_a_store_that_loses_jobs_is_a_problem_with_a_remedy(
    cli: Cli, own_redis: str, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("TENURE_GATEWAY_PORT", str(free_port))
    for setting in (
        ("appendonly", "no"),
        ("maxmemory", "100mb"),
        ("maxmemory-policy", "allkeys-lru"),
        ("appendfsync", "no"),
    ):
        ask(own_redis, "CONFIG", "SET", *setting)
    said = cli("doctor", "-q", f"streams+{own_redis}", "--json")
    assert said.code == 8
    problems = {name for name, f in by_check(said).items() if f["level"] == "problem"}
    assert problems == {"append-only file", "eviction", "appendfsync"}
    assert all(by_check(said)[name]["remedy"] for name in problems)
    assert (
        "-> redis-cli config set maxmemory-policy noeviction"
        in cli("doctor", "-q", f"streams+{own_redis}").out
    )


def test_a_replica_is_a_problem(cli: Cli, own_redis: str) -> None:
    ask(own_redis, "REPLICAOF", "127.0.0.1", 1)
    said = cli("doctor", "-q", f"streams+{own_redis}", "--json")
    assert by_check(said)["role"]["level"] == "problem"
    assert said.code == 8


def test_a_store_that_is_away_is_a_finding_and_not_a_crash(cli: Cli) -> None:
    said = cli("doctor", "-q", "streams+redis://127.0.0.1:1/0", "--json")
    assert said.code == 8
    assert by_check(said)["reachable"]["level"] == "problem"


def test_a_job_whose_worker_died_is_found(cli: Cli, queue_url: str) -> None:
    short = f"{queue_url}&lease_ms=50"

    async def claim_and_die() -> None:
        queue = open_queue(short, worker_id="dead-worker")
        await queue.submit([NewJob(task="chat", payload=b"{}")])
        assert len(await queue.claim(1, wait_ms=1000)) == 1
        await queue.close()

    asyncio.run(claim_and_die())
    wait_until(
        lambda: by_check(cli("doctor", "-q", short, "--json"))["running jobs"]["level"] == "problem"
    )
    workers = by_check(cli("doctor", "-q", short, "--json"))["workers"]
    assert "gone with work in hand: dead-worker" in workers["detail"]
    assert cli("doctor", "-q", short).code == 8


def test_a_paused_and_a_full_queue_are_noticed(cli: Cli, queue_url: str) -> None:
    async def claim_one() -> None:
        queue = open_queue(queue_url, worker_id="w")
        await queue.submit([NewJob(task="chat", payload=b"{}")] * 2)
        await queue.claim(1, wait_ms=1000)
        await queue.close()

    asyncio.run(claim_one())
    assert by_check(cli("doctor", "--json"))["pause"]["level"] == "ok"
    cli("pause")
    found = by_check(cli("doctor", "-q", f"{queue_url}&max_depth=2", "--json"))
    assert (found["pause"]["level"], found["pause"]["remedy"]) == ("note", "tenure resume")
    assert found["depth"]["level"] == "problem"


def test_a_port_that_is_taken_by_something_else_is_a_problem(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setenv("TENURE_GATEWAY_PORT", str(other.getsockname()[1]))
        other.settimeout(5)
        said = cli("doctor", "--json")
    assert by_check(said)["gateway port"]["level"] == "problem"
    assert said.code == 8


def test_a_misspelt_variable_is_noted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_GATEWAY_PROT", "1")
    assert "TENURE_GATEWAY_PROT" in by_check(cli("doctor", "--json"))["settings"]["detail"]


def test_bench_measures_on_a_store_of_its_own(cli: Cli, start: Start) -> None:
    bench = start("bench", "--jobs", "500", "--seconds", "0.5", "--json")
    assert bench.ended() == 0, bench.words
    figures = json.loads(bench.out[0])
    assert figures["jobs"] == 500
    assert figures["enqueue_per_s"] > 0
    assert figures["run_per_s"] > 0
    assert 0 < figures["start_latency_ms"]["p50"] <= figures["start_latency_ms"]["p99"]
    assert cli("ls", "--json").lines == []  # the queue that is set was not touched


@pytest.mark.parametrize("contract", ["bullmq", "omniq"])
def test_a_queue_of_another_redis_contract_is_looked_at_too(
    contract: str, cli: Cli, redis_url: str, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("TENURE_GATEWAY_PORT", str(free_port))
    url = f"{contract}+{redis_url}?queue=doctor-{free_port}"
    said = cli("doctor", "-q", url, "--json")
    assert said.code == 0, said.out
    assert {"append-only file", "queue", "workers", "dead letters"} <= set(by_check(said))
    asyncio.run(put_in(url))
    said = cli("doctor", "-q", url, "--json")
    assert (said.code, by_check(said)["workers"]["level"]) == (8, "problem")
    assert "tenure worker app.py --queue" in by_check(said)["workers"]["remedy"]


async def put_in(url: str) -> None:
    queue = open_queue(url)
    try:
        (made,) = await queue.submit([NewJob(task="x", payload=b"{}")])
        assert made.accepted
    finally:
        await queue.close()


def test_an_sqlite_queue_is_looked_at_with_its_file_and_disk(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("TENURE_GATEWAY_PORT", str(free_port))
    url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    asyncio.run(put_in(url))
    found = by_check(cli("doctor", "-q", url, "--json"))
    assert found["database file"]["detail"].endswith("log wal")
    assert found["disk"]["detail"].endswith("GB free")
    assert found["workers"]["level"] == "problem"
    (tmp_path / "broken.db").write_bytes(b"not a database, whatever its name says" * 100)
    said = cli("doctor", "-q", f"inbox+sqlite:///{tmp_path}/broken.db", "--json")
    assert said.code == 8
    assert "not a database" in by_check(said)["database file"]["detail"]
    assert "queue" not in by_check(said)
    said = cli("doctor", "-q", f"plane+sqlite:///{tmp_path}/nowhere/jobs.db", "--json")
    assert by_check(said)["folder"]["remedy"] == f"mkdir -p {tmp_path}/nowhere"


def test_a_plane_that_does_not_answer_is_a_problem_and_one_that_does_is_not(
    cli: Cli, start: Start, tmp_path: Path, free_port: int
) -> None:
    url = f"plane+http://127.0.0.1:{free_port}"
    said = cli("doctor", "-q", url, "--json")
    assert (said.code, by_check(said)["gateway"]["level"]) == (8, "problem")
    gateway = start("gateway", "--port", str(free_port), "--queue", "plane+sqlite:///plane.db")
    gateway.heard("gateway_ready")
    found = by_check(cli("doctor", "-q", url, "--json"))
    assert (found["gateway"]["level"], found["gateway ready"]["level"]) == ("ok", "ok")


def test_a_postgres_that_is_away_or_unsafe_is_told_with_its_remedy(cli: Cli) -> None:
    said = cli("doctor", "-q", "inbox+postgresql://nobody@127.0.0.1:1/none", "--json")
    assert (said.code, by_check(said)["reachable"]["level"]) == (8, "problem")
    row = {"number": 120_000, "version": "12.1", "fsync": "off", "replica": True, "open_s": 999}
    found = {finding.check: finding for finding in server_findings(row)}
    assert {name for name, f in found.items() if f.level == "problem"} == {
        "postgres version", "fsync", "role",
    }  # fmt: skip
    assert all(finding.remedy for finding in found.values())
