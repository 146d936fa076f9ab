"""Commands that look at whole queues, move them, or begin a project."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tenure.cli.bridge import Bridge, moved_id
from tenure.core.job import JobRecord, NewJob
from tenure.core.outcome import Failure, Outcome
from tenure.core.registry import open_ledger, open_queue
from tenure.core.seam import Query
from tenure.store.embedded import EmbeddedPostgres
from tenure.store.postgres import Postgres
from tenure.store.redis import Redis
from tenure.sync import Client
from tests.contract.cli.conftest import Cli
from tests.contract.stages import Staffing


@pytest.fixture
def mail_url(redis_url: str) -> str:
    return f"bullmq+{redis_url}?queue=mail-{secrets.token_hex(4)}"


def submit(url: str, *jobs: NewJob) -> list[str]:
    async def submit() -> list[str]:
        queue = open_queue(url)
        try:
            return [made.job_id for made in await queue.submit(jobs)]
        finally:
            await queue.close()

    return asyncio.run(submit())


def jobs_of(url: str) -> list[JobRecord]:
    async def find() -> list[JobRecord]:
        ledger = open_ledger(url)
        try:
            return (await ledger.find(Query(limit=1_000))).jobs
        finally:
            await ledger.close()

    return asyncio.run(find())


def fail_all(url: str, code: str) -> None:
    async def fail() -> None:
        queue = open_queue(url, worker_id="w1")
        failure = Failure(code=code, message=f"{code} happened")
        try:
            while leases := await queue.claim(100, wait_ms=100):
                await queue.settle([Outcome(lease, "bury", failure=failure) for lease in leases])
        finally:
            await queue.close()

    asyncio.run(fail())


def test_workers_are_listed_with_what_they_hold(cli: Cli, queue_url: str, mail_url: str) -> None:
    submit(mail_url, NewJob(task="send", payload=b"{}"))

    async def hold() -> Any:
        queue = open_queue(mail_url, worker_id="w-9")
        try:
            await queue.claim(1, wait_ms=1_000)
            assert isinstance(queue, Staffing)
            queue.slots = 4
            await queue.upkeep()
            return await asyncio.to_thread(
                cli, "workers", "-q", queue_url, "-q", mail_url, "--json"
            )
        finally:
            await queue.close()

    (worker,) = [line for line in asyncio.run(hold()).lines if line["worker_id"] == "w-9"]
    assert [job["task"] for job in worker["jobs"]] == ["send"]
    assert worker["slots"] == 4
    assert "no worker" in cli("workers", "-q", queue_url).err


def test_dead_letters_are_grouped_and_a_class_is_sent_back(cli: Cli, mail_url: str) -> None:
    submit(mail_url, *[NewJob(task="send", payload=b"{}") for _ in range(5)])
    fail_all(mail_url, "Timeout")
    submit(mail_url, NewJob(task="other", payload=b"{}"))
    fail_all(mail_url, "KeyError")
    groups = cli("dead", "-q", mail_url, "--json").lines
    assert [(group["error_class"], group["jobs"]) for group in groups] == [
        ("Timeout", 5), ("KeyError", 1),
    ]  # fmt: skip
    done = cli("dead", "-q", mail_url, "--retry", "Timeout", "--json")
    assert (done.code, done.lines[0]["answers"]) == (0, {"ok": 5})
    states = sorted(job.state for job in jobs_of(mail_url))
    assert states == ["failed", *["waiting"] * 5]
    assert cli("dead", "-q", mail_url, "--remove", "KeyError").code == 0
    assert "no job has failed" in cli("dead", "-q", mail_url).err


def test_top_shows_every_queue_once_for_people_and_programs(
    cli: Cli, queue_url: str, mail_url: str
) -> None:
    submit(queue_url, *[NewJob(task="chat", payload=b"{}") for _ in range(3)])
    (seen,) = cli("top", "-q", queue_url, "-q", mail_url, "--once", "--json").lines
    assert seen["queues"][0]["states"]["waiting"] == 3
    assert seen["queues"][0]["figures"]["submitted"] == 3
    text = cli("top", "-q", queue_url, "-q", mail_url, "--once").out
    assert "streams" in text
    assert "bullmq:mail" in text


def test_a_bridge_carries_everything_that_waits_once(
    cli: Cli, queue_url: str, mail_url: str
) -> None:
    ids = submit(mail_url, *[NewJob(task="chat", payload=b'{"n":%d}' % n) for n in range(250)])
    (late,) = submit(mail_url, NewJob(task="chat", payload=b"{}", delay_ms=3_600_000))
    done = cli("bridge", "-q", mail_url, "--to", queue_url, "--json")
    assert (done.code, done.lines[0]["moved"]) == (0, 251)
    arrived = {job.job_id: job for job in jobs_of(queue_url)}
    assert arrived.keys() == {moved_id(mail_url, job_id) for job_id in (*ids, late)}
    assert arrived[moved_id(mail_url, ids[7])].payload == b'{"n":7}'
    assert arrived[moved_id(mail_url, late)].due_ms > time.time() * 1000 + 3_500_000
    assert jobs_of(mail_url) == []
    assert cli("bridge", "-q", mail_url, "--to", queue_url, "--json").lines[0]["moved"] == 0


def test_a_bridge_that_broke_between_storing_and_settling_makes_no_second_job(
    queue_url: str, mail_url: str
) -> None:
    from_url = f"{mail_url}&lease_ms=300&stalled_ms=200"
    submit(from_url, *[NewJob(task="chat", payload=b"{}") for _ in range(20)])

    async def broken() -> None:
        source, ledger = open_queue(from_url, worker_id="b1"), open_ledger(from_url)
        target = open_queue(queue_url)
        try:
            leases = await source.claim(10, wait_ms=500)
            way = Bridge(from_url, source, ledger, target)
            assert leases
            await way._store(leases)
        finally:  # and here it is killed: nothing is settled
            for part in (source, ledger, target):
                await part.close()

    async def again() -> Any:
        source, ledger = open_queue(from_url, worker_id="b2"), open_ledger(from_url)
        target = open_queue(queue_url)
        total = replayed = 0
        try:
            async with asyncio.timeout(30):
                while total < 20:
                    await source.upkeep()
                    went = await Bridge(from_url, source, ledger, target).run()
                    total, replayed = total + went.moved, replayed + went.replayed
        finally:
            for part in (source, ledger, target):
                await part.close()
        return total, replayed

    asyncio.run(broken())
    assert asyncio.run(again()) == (20, 10)
    assert len(jobs_of(queue_url)) == 20
    assert jobs_of(mail_url) == []


def test_a_bridge_refuses_while_workers_serve_the_old_queue(
    cli: Cli, queue_url: str, mail_url: str
) -> None:
    async def with_worker() -> Any:
        queue = open_queue(queue_url, worker_id="w1")
        try:
            await queue.claim(1, wait_ms=10)
            return await asyncio.to_thread(cli, "bridge", "-q", queue_url, "--to", mail_url)
        finally:
            await queue.close()

    refused = asyncio.run(with_worker())
    assert refused.code == 4
    assert "stop them first" in refused.err


def test_init_writes_a_project_whose_handler_runs(cli: Cli, queue_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "hello"
    assert cli("init", str(folder)).code == 0
    assert "is there already" in cli("init", str(folder)).err
    (job_id,) = submit(queue_url, NewJob(task="greet", payload=b'{"name":"Ada"}'))
    command = [sys.executable, "-m", "tenure.cli", "worker", "handlers.py", "--burst"]
    subprocess.run(
        [*command, "--queue", queue_url], cwd=folder, check=True, timeout=60, capture_output=True
    )
    (job,) = jobs_of(queue_url)
    assert (job.job_id, json.loads(job.result)) == (job_id, {"text": "Hello, Ada!"})
    unit = (folder / "systemd" / "tenure-worker.service").read_text()
    assert f"WorkingDirectory={folder}" in unit
    assert "{" not in unit


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_one_its_shell_can_read(cli: Cli, shell: str) -> None:
    script = cli("completion", shell).out
    assert "_TENURE_COMPLETE" in script
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n", "-c", script], check=True)


def test_the_shell_is_told_commands_and_options() -> None:
    def complete(*words: str) -> str:
        environment = os.environ | {
            "_TENURE_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(("tenure", *words)),
            "COMP_CWORD": str(len(words)),
        }
        code = "from tenure.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        return done.stdout

    assert "plain,submit" in complete("sub")
    assert "plain,--json" in complete("ls", "--j")


def test_top_ends_quietly_on_ctrl_c(queue_url: str) -> None:
    command = [sys.executable, "-m", "tenure.cli", "top", "-q", queue_url, "--interval", "0.2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "tenure top" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert "Traceback" not in said


def test_check_says_which_clauses_a_live_store_keeps(cli: Cli, redis_url: str) -> None:
    done = cli(
        "check", "-q", f"streams+{redis_url}", "--only", "test_pause or test_retry", "--json"
    )
    assert done.code == 0, done.err
    verdicts = {line["clause"]: line["verdict"] for line in done.lines}
    assert verdicts["M-10"] == "held"
    assert set(verdicts.values()) <= {"held", "not asked"}


@pytest.mark.parametrize("contract", ["streams", "bullmq", "omniq"])
async def test_check_leaves_nothing_behind_in_redis(
    cli: Cli, redis_url: str, contract: str
) -> None:
    query = "" if contract == "streams" else "?queue=mine"
    words = ("check", "-q", f"{contract}+{redis_url}{query}", "--only", "test_pause", "--json")
    done = await asyncio.to_thread(cli, *words)
    assert done.code == 0, done.err
    redis = Redis(redis_url)
    assert await redis.call("KEYS", "*suite*") == []
    await redis.close()


@pytest.mark.parametrize("contract", ["inbox", "plane"])
async def test_check_leaves_nothing_behind_in_postgresql(cli: Cli, contract: str) -> None:
    server = EmbeddedPostgres()
    url = await asyncio.to_thread(server.start)
    try:
        words = ("check", "-q", f"{contract}+{url}", "--only", "test_pause", "--json")
        done = await asyncio.to_thread(cli, *words)
        assert done.code == 0, done.err
        database = Postgres(url, schema="public")
        names = await database.fetch("SELECT nspname FROM pg_namespace", [])
        await database.close()
    finally:
        await asyncio.to_thread(server.stop)
    strange = [row[0] for row in names if not row[0].startswith(("pg_", "information", "public"))]
    assert strange == []


@pytest.mark.parametrize(
    ("url", "code", "told"),
    [
        ("streams+redis://127.0.0.1:1/0", 5, "cannot connect"),
        ("inbox+postgresql://nobody@127.0.0.1:1/x", 5, "PostgreSQL"),
        ("inbox+sqlite:////no/such/folder/jobs.db", 2, "no folder"),
        ("plane+http://127.0.0.1:1", 2, "at its database"),
        ("garbage", 2, "is not a queue URL"),
    ],
)
def test_check_of_a_store_that_is_not_there_judges_nothing(
    cli: Cli, url: str, code: int, told: str
) -> None:
    said = cli("check", "-q", url)
    assert (said.code, said.out, told in said.err) == (code, "", True), said.err


def test_check_of_a_file_runs_beside_it_and_on_no_other_store(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "check", "-q", f"plane+sqlite:///{tmp_path}/jobs.db", "--only", "test_pause", "--json"
    )
    assert done.code == 0, done.err
    told = {line["clause"]: (line["verdict"], line["tests"]) for line in done.lines}
    assert told["M-10"] == ("held", 4)
    assert list(tmp_path.glob("jobs.db*")) == []


def test_check_finds_a_store_that_does_not_keep_a_clause() -> None:
    from tenure.cli.selftest import CaseResult, clause_verdicts

    ran = [CaseResult("a", True, ("M-10",)), CaseResult("b", False, ("M-10", "M-2"))]
    verdicts = {clause.clause: clause for clause in clause_verdicts(ran)}
    assert (verdicts["M-10"].verdict, verdicts["M-10"].failed) == ("broken", ("b",))
    assert verdicts["M-2"].verdict == "broken"
    assert verdicts["M-1"].verdict == "not asked"


def test_schedules_are_listed_and_removed(cli: Cli, queue_url: str) -> None:
    with Client(queue_url) as client:
        made = client.schedule("report", {"days": 7}, cron="0 3 * * *", tz="Europe/Berlin")
        client.schedule("tidy", every_s=600)
    tidy, report = cli("schedules", "--json").lines
    assert (tidy["name"], tidy["every_ms"], tidy["next_ms"] > 0) == ("tidy", 600_000, True)
    assert (report["task"], report["payload"]) == ("report", {"days": 7})
    assert (report["cron"], report["tz"], report["next_ms"]) == (
        "0 3 * * *", "Europe/Berlin", made.next_ms,
    )  # fmt: skip
    shown = cli("schedules").out
    assert "every 600 s" in shown
    assert "0 3 * * * Europe/Berlin" in shown
    assert cli("schedules", "--remove", "tidy").code == 0
    gone = cli("schedules", "--remove", "tidy")
    assert gone.code != 0
    assert "there is no schedule 'tidy'" in gone.err
    assert [each["name"] for each in cli("schedules", "--json").lines] == ["report"]
