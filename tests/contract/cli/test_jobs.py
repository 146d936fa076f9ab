"""submit, watch, ls, inspect, cancel, retry, remove, pause, resume, queues on a real store."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path

import pytest

from tenure.store.embedded import EmbeddedRedis
from tests.contract.cli.conftest import Cli, Start, wait_until

APP = """
import asyncio
from tenure import Fatal, task

@task("chat")
async def chat(job):
    await job.report(50, "half")
    return {"said": job.payload.get("prompt")}

@task("plan")
async def plan(job):
    raise Fatal("no plan today")

@task("code")
async def code(job):
    await asyncio.sleep(300)
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app.py"
    path.write_text(APP)
    return path


def test_submit_prints_the_id_and_inspect_shows_the_job(cli: Cli) -> None:
    said = cli("submit", "chat", "-d", '{"prompt": "hi"}')
    assert (said.code, said.err) == (0, "")
    job_id = said.out.strip()
    shown = cli("inspect", job_id, "--json").lines[0]
    assert (shown["state"], shown["payload"]) == ("waiting", {"prompt": "hi"})
    assert [event["type"] for event in shown["events"]] == ["queued"]
    text = cli("inspect", job_id).out
    assert job_id in text
    assert '{"prompt":"hi"}' in text


def test_the_payload_may_come_from_a_file_or_from_stdin(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "payload.json").write_text('{"from":\n "file"}')
    by_file = cli("submit", "chat", "-d", "@payload.json").out.strip()
    assert cli("inspect", by_file, "--json").lines[0]["payload"] == {"from": "file"}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"from": "stdin"}')))
    by_stdin = cli("submit", "chat", "-d", "-").out.strip()
    assert cli("inspect", by_stdin, "--json").lines[0]["payload"] == {"from": "stdin"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-d", "{oops"], "--data is not JSON"),
        (["-d", "@none.json"], "none.json cannot be read: No such file"),
        (["--timeout", "0"], "more than 0 seconds"),
        (["--max-attempts", "0"], "0 is not in the range"),
    ],
)
def test_a_submit_that_cannot_be_meant_is_refused_before_the_store(
    cli: Cli, args: list[str], words: str
) -> None:
    said = cli("submit", "chat", *args)
    assert (said.code, said.out) == (2, "")
    assert words in said.err
    assert cli("ls", "--json").lines == []


def test_the_same_key_gives_the_same_job_and_another_payload_is_a_conflict(cli: Cli) -> None:
    first = cli("submit", "chat", "-d", '{"n": 1}', "--idempotency-key", "k1")
    again = cli("submit", "chat", "-d", '{"n": 1}', "--idempotency-key", "k1", "--json")
    assert again.lines == [{"job_id": first.out.strip(), "status": "replayed"}]
    other = cli("submit", "chat", "-d", '{"n": 2}', "--idempotency-key", "k1")
    assert (other.code, other.out) == (4, "")
    assert "another request was already made" in other.err


def test_a_full_queue_says_when_to_try_again(cli: Cli, queue_url: str) -> None:
    full = f"{queue_url}&max_depth=1"
    assert cli("submit", "chat", "--queue", full).code == 0
    said = cli("submit", "chat", "--queue", full, "--json")
    assert said.code == 1
    problem = json.loads(said.err)
    assert problem["code"] == "queue_full"
    assert "try again in 1 s" in problem["detail"]


def test_wait_prints_the_result_and_follow_prints_the_events(
    cli: Cli, start: Start, app: Path
) -> None:
    worker = start("worker", "app.py", "--log-level", "warning")
    said = cli("submit", "chat", "-d", '{"prompt": "hi"}', "--wait", "--timeout", "30")
    assert (said.code, said.lines) == (0, [{"said": "hi"}])
    followed = cli("submit", "chat", "--follow", "--json", "--timeout", "30")
    assert [event["type"] for event in followed.lines] == ["queued", "running", "progress", "done"]
    job_id = followed.err.split()[1]
    watched = cli("watch", job_id, "--json")
    assert (watched.code, watched.lines) == (0, followed.lines)
    assert "done" in cli("watch", job_id).out
    whole = cli("submit", "chat", "--wait", "--json", "--timeout", "30").lines[0]
    assert (whole["state"], whole["attempt"]) == ("done", 1)
    worker.kill()


def test_a_failed_job_is_exit_code_6_with_its_reason(cli: Cli, start: Start, app: Path) -> None:
    start("worker", "app.py")
    said = cli("submit", "plan", "--wait", "--timeout", "30", "--json")
    assert said.code == 6
    problem = json.loads(said.err.splitlines()[-1])
    assert (problem["state"], problem["own_state"]) == ("failed", "error")
    assert "no plan today" in problem["detail"]
    assert cli("watch", problem["job_id"]).code == 6


def test_a_job_that_takes_too_long_is_exit_code_7_and_goes_on(cli: Cli) -> None:
    said = cli("submit", "chat", "--wait", "--timeout", "0.3")
    assert said.code == 7
    assert "`tenure watch" in said.err
    assert cli("ls", "--json").lines[0]["state"] == "waiting"


def test_ls_filters_and_pages_without_gap_or_repeat(cli: Cli) -> None:
    ids = [cli("submit", task).out.strip() for task in ("chat", "embed", "chat", "chat", "rag")]
    seen, after = [], ""
    while True:
        page = cli("ls", "--json", "--limit", "2", *(["--after", after] if after else []))
        seen += [job["job_id"] for job in page.lines]
        if "more: --after " not in page.err:
            break
        after = page.err.split("--after ")[1].strip()
    assert sorted(seen) == sorted(ids)
    assert [job["task"] for job in cli("ls", "--json", "--task", "chat").lines] == ["chat"] * 3
    assert cli("ls", "--json", "--state", "done").lines == []
    assert cli("ls", "--state", "done").err == "no jobs like that\n"
    wrong = cli("ls", "--state", "finished")
    assert wrong.code == 2
    assert "no such state: finished; there are queued" in wrong.err


def test_cancel_retry_and_remove_answer_per_job_and_the_worst_is_the_exit_code(cli: Cli) -> None:
    job_id = cli("submit", "chat").out.strip()
    canceled = cli("cancel", job_id, "nobody")
    assert canceled.code == 3
    assert canceled.out == f"{job_id} canceled\n"
    assert "nobody: there is no such job" in canceled.err
    again = cli("cancel", job_id, "--json")
    assert (again.code, again.lines[0]["ok"]) == (4, False)
    assert cli("retry", job_id).out == f"{job_id} queued again\n"
    conflict = cli("retry", job_id)
    assert conflict.code == 4
    assert "the job is queued" in conflict.err
    assert cli("remove", job_id).code == 0
    gone = cli("inspect", job_id)
    assert gone.code == 3
    assert f"there is no job {job_id}" in gone.err


def test_a_running_job_is_canceled_through_its_worker(cli: Cli, start: Start, app: Path) -> None:
    start("worker", "app.py")
    job_id = cli("submit", "code").out.strip()
    wait_until(lambda: cli("inspect", job_id, "--json").lines[0]["state"] == "running")
    assert cli("cancel", job_id).out == f"{job_id} told to its worker\n"
    watched = cli("watch", job_id, "--timeout", "30", "--json")
    assert (watched.code, watched.lines[-1]["type"]) == (6, "canceled")


def test_ctrl_c_while_watching_is_exit_code_130(cli: Cli, start: Start) -> None:
    job_id = cli("submit", "chat").out.strip()
    watching = start("watch", job_id)
    watching.heard("queued")
    watching.signal(signal.SIGINT)
    assert watching.ended() == 130
    assert [line for line in watching.err if line] == ["tenure: interrupted"]


def test_pause_holds_jobs_back_until_resume(cli: Cli, start: Start, app: Path) -> None:
    assert cli("pause").code == 0
    start("worker", "app.py").heard("worker starts")
    said = cli("submit", "chat", "--wait", "--timeout", "1")
    assert said.code == 7
    assert cli("queues", "--json").lines[0]["paused"] is True
    assert "paused" in cli("queues").out
    assert cli("resume", "--json").lines[0]["paused"] is False
    assert cli("watch", said.err.split()[1], "--timeout", "30").code == 0


def test_queues_counts_what_waits(cli: Cli) -> None:
    for _ in range(3):
        cli("submit", "chat")
    counts = cli("queues", "--json").lines[0]
    assert (counts["states"]["waiting"], counts["own_states"]["queued"]) == (3, 3)
    assert counts["totals"]["submitted"] == 3
    assert counts["oldest_waiting_ms"] >= 0


def test_a_store_that_is_away_is_exit_code_5_for_every_command(cli: Cli) -> None:
    nobody = "streams+redis://127.0.0.1:1/0"
    for args in (["ls"], ["inspect", "x"], ["cancel", "x"], ["pause"], ["submit", "chat"]):
        said = cli(*args, "--queue", nobody)
        assert (said.code, said.out) == (5, ""), args
        assert "tenure doctor" in said.err
        assert len(said.err.splitlines()) == 1


def test_whoever_waits_for_a_job_outlasts_a_restart_of_its_store(
    start: Start, app: Path, tmp_path: Path
) -> None:
    server = EmbeddedRedis(tmp_path / "store")
    url = f"streams+{server.start()}"
    try:
        waiting = start("submit", "chat", "-d", '{"prompt": "hi"}', "--wait", "--queue", url)
        following = start("watch", waiting.heard("job ").split()[1], "--queue", url)
        following.heard("queued")
        server.kill()
        server.start()
        start("worker", str(app), "--queue", url)
        assert (waiting.ended(), waiting.out) == (0, ['{"said":"hi"}'])
        assert following.ended() == 0
        assert "done" in following.words
    finally:
        server.stop()
