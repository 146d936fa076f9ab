"""`tenure up` whole: a store, a gateway, a worker, samples, and an orderly end."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure.sql.schema import known
from tenure.store.embedded import EmbeddedPostgres
from tests.contract.cli.conftest import Program, wait_until
from tests.contract.cli.upped import Up, children
from tests.unit.tasks.model_server import model_server

TASKS = {"chat", "plan", "code", "tool", "rag", "embed"}


@pytest.fixture
def up(tmp_path: Path, free_port: int) -> Iterator[Up]:
    up = Up(tmp_path, free_port, "--no-node")
    yield up
    up.program.kill()


def test_jobs_of_all_six_tasks_flow_within_a_minute_and_ctrl_c_drains(up: Up) -> None:
    assert up.seconds < 30
    text = "\n".join(up.program.out)
    assert f"http://127.0.0.1:{up.port}/v1/jobs" in text
    assert text.count("curl -s") == 3

    wait_until(lambda: up.tasks_done() >= TASKS, within_s=60)
    listed = up.call("ls", "--state", "done", "--limit", "500")
    assert {job["task"] for job in listed} == TASKS
    results = up.call("ls", "--state", "done", "--limit", "1")
    assert results[0]["result"]["sample"] is True
    parts = children(up.program.process.pid, "")
    up.program.signal(signal.SIGINT)
    assert up.program.ended() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in parts)
    assert not (up.folder / ".tenure" / "up.json").exists()
    assert "stopped; the data stay in" in up.program.words


def test_node_s_own_bullmq_takes_over_when_npm_has_brought_it(
    tmp_path: Path, free_port: int
) -> None:
    up = Up(tmp_path, free_port)
    try:
        assert up.seconds < 30
        up.program.heard("npm brings bullmq 6.7.0")
        up.program.heard("Node's own bullmq 6.7.0 adds the jobs", within_s=100)
        up.program.heard("completed, by a Python worker")
        wait_until(lambda: "sample-node" in up.videos(), every_s=0.5)
        (producer,) = children(up.program.process.pid, "main.mjs")
        os.kill(producer, signal.SIGKILL)
        up.program.heard("Node's producer was ended by SIGKILL: ours goes on")
        up.program.signal(signal.SIGTERM)
        assert up.program.ended() == 0

        up.start()  # what npm brought is still there
        up.program.heard("Node's own bullmq 6.7.0 adds the jobs")
        assert "npm brings" not in up.program.words
        wait_until(lambda: children(up.program.process.pid, "main.mjs"))
        (producer,) = children(up.program.process.pid, "main.mjs")
        up.program.process.kill()
        wait_until(lambda: not Path(f"/proc/{producer}").exists())
    finally:
        up.program.kill()


def test_without_the_network_the_samples_are_ours_and_it_says_why(
    tmp_path: Path, free_port: int
) -> None:
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text("#!/bin/sh\necho 'npm error network is away'\nexit 1\n")
    npm.chmod(0o755)
    up = Up(tmp_path, free_port, PATH=f"{npm.parent}:{os.environ['PATH']}")
    try:
        up.program.heard("could not bring the package (npm error network is away): the jobs of")
        wait_until(lambda: up.worked("bullmq"))
        assert up.videos()
        assert list((tmp_path / ".tenure" / "samples").iterdir()) == []
    finally:
        up.program.kill()


def test_no_samples_serves_what_an_earlier_version_left_and_feeds_nothing(
    tmp_path: Path, free_port: int
) -> None:
    earlier = tmp_path / ".tenure" / "inbox.db"
    earlier.parent.mkdir(mode=0o700)
    earlier.touch(mode=0o600)  # made, and not migrated
    up = Up(tmp_path, free_port, "--no-samples")
    try:
        done = ", ".join(f"{number:04}_{name}" for number, name, *_ in known("sqlite"))
        assert f"schema brought up to date ({done})" in up.program.words
        url = up.call("queues")[1]["url"]
        args = ["submit", "video-generation", "-d", "{}", "--queue", url, "--json"]
        asked = Program([*args, "--wait", "--timeout", "30"], tmp_path, {})
        asked.ended()
        assert "payload.videoId is missing" in asked.words
        assert up.call("queues")[0]["totals"] == {}
        assert len(up.call("ls", "--queue", url)) == 1
        assert not (tmp_path / ".tenure" / "samples").exists()
        assert not (tmp_path / ".tenure" / "transcode").exists()
        assert "see webhooks" not in up.program.words
        assert not children(up.program.process.pid, "\0receiver\0")
        hook = {"status_webhook_url": f"http://127.0.0.1:{free_port + 10}/hooks"}
        wanted = {"source": {"url": "s3://a/b"}, "outputs": [{"name": "a.jpg", "format": "jpg"}]}
        assert up.ask("POST", "/transcode", wanted | hook)[0] == 422
    finally:
        up.program.kill()


def test_without_ffmpeg_it_says_so_and_the_rest_runs(tmp_path: Path, free_port: int) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "imageio_ffmpeg.py").write_text(
        "def get_ffmpeg_exe():\n    raise RuntimeError('no ffmpeg exe could be found')\n"
    )
    path = f"{tmp_path / 'hidden'}:{os.environ.get('PYTHONPATH', '')}"
    up = Up(tmp_path, free_port, "--no-node", PYTHONPATH=path, PATH="/nowhere")
    try:
        up.program.heard("no samples of transcoding: no ffmpeg found")
        wait_until(lambda: up.worked("streams"))
    finally:
        up.program.kill()


def test_a_restart_keeps_the_data(up: Up) -> None:
    job_id = up.call("submit", "chat", "-d", '{"prompt": "keep me"}')[0]["job_id"]
    up.program.signal(signal.SIGTERM)
    assert up.program.ended() == 0
    up.start("--no-samples")
    status, job = up.get(f"/v1/jobs/{job_id}")
    assert (status, job["payload"]) == (200, {"prompt": "keep me"})
    wait_until(lambda: up.get(f"/v1/jobs/{job_id}")[1]["status"] == "done")


def test_worker_gateway_and_store_may_be_killed_and_come_back(up: Up) -> None:
    pid = up.program.process.pid
    for word, said in (
        ("\0worker\0", "worker runs again"),
        ("\0gateway\0", "gateway runs again"),
        ("-server", "the store runs again"),
    ):
        (victim,) = children(pid, word)
        os.kill(victim, signal.SIGKILL)
        up.program.heard(said)
    before = time.monotonic()
    job_id = up.call("submit", "chat", "-d", '{"prompt": "after the storm"}')[0]["job_id"]
    wait_until(lambda: up.get(f"/v1/jobs/{job_id}")[1].get("status") == "done")
    assert time.monotonic() - before < 40
    assert up.program.process.poll() is None


def test_a_second_ctrl_c_stops_at_once(up: Up) -> None:
    slow = '{"prompt": "x", "sample": {"steps": 100, "delay_s": 1}}'
    job_id = up.call("submit", "chat", "-d", slow)[0]["job_id"]
    wait_until(lambda: up.get(f"/v1/jobs/{job_id}")[1]["status"] == "running")
    begin = time.monotonic()
    up.program.signal(signal.SIGINT)
    up.program.heard("Ctrl-C again stops at once")
    up.program.signal(signal.SIGINT)
    up.program.ended()
    assert time.monotonic() - begin < 20
    up.start("--no-samples")
    wait_until(lambda: up.get(f"/v1/jobs/{job_id}")[1]["status"] == "running")


def test_a_taken_port_names_the_remedy_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused = Program(["up", "--port", str(port)], tmp_path, {})
        assert refused.ended() == 4
    assert f"choose another: tenure up --port {port + 1}" in refused.words
    assert not (tmp_path / ".tenure").exists()


def test_a_task_with_a_real_model_gets_no_samples(tmp_path: Path, free_port: int) -> None:
    with model_server() as script:
        program = Program(
            ["up", "--port", str(free_port), "--no-node"],
            tmp_path,
            {"TENURE_LLM_URL": script.url},
        )
        try:
            program.heard("no samples for chat, plan, code, rag, embed")
            args = ["submit", "chat", "-d", '{"prompt": "hi"}', "--wait", "--timeout", "30"]
            asked = Program(args, tmp_path, {})
            assert asked.ended() == 0, asked.words
            assert json.loads(asked.out[0])["text"] == "Hello, world"
        finally:
            program.kill()
    chats = [body for path, body, _ in script.asked if path.endswith("/chat/completions")]
    assert len(chats) == 1


def test_a_named_redis_is_used_and_left_running(
    tmp_path: Path, free_port: int, redis_url: str
) -> None:
    program = Program(
        ["up", "--port", str(free_port), "--redis", redis_url, "--no-samples"], tmp_path, {}
    )
    try:
        program.heard("tenure is up")
        assert not (tmp_path / ".tenure" / "redis").exists()
        program.signal(signal.SIGTERM)
        assert program.ended() == 0
    finally:
        program.kill()
    ping = Program(["queues", "-q", f"streams+{redis_url}"], tmp_path, {})
    assert ping.ended() == 0


def test_a_named_redis_that_is_away_ends_it_with_exit_code_5(
    tmp_path: Path, free_port: int
) -> None:
    args = ["up", "--port", str(free_port), "--redis", "redis://127.0.0.1:1/0"]
    program = Program(args, tmp_path, {})
    assert program.ended() == 5


def test_nothing_outlives_an_up_that_is_killed(up: Up) -> None:
    parts = children(up.program.process.pid, "")
    assert len(parts) >= 3
    up.program.process.kill()
    up.program.ended()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in parts))


def test_the_worker_goes_on_when_somebody_makes_an_api_key(up: Up) -> None:
    def done() -> int:
        (plane,) = [each for each in up.call("queues") if each["url"].startswith("plane+")]
        return int(plane["totals"].get("SUCCEEDED", 0))

    key = up.folder / ".tenure" / "worker.key"
    assert key.stat().st_mode & 0o777 == 0o600
    up.call("keys", "create", "somebody")
    wait_until(lambda: up.ask("POST", "/v1/jobs", {"task": "chat", "payload": {}})[0] == 401)
    before = done()
    wait_until(lambda: done() >= before + 2, within_s=60, every_s=0.5)


def test_with_a_postgres_the_sql_contracts_keep_their_jobs_there(
    tmp_path: Path, free_port: int
) -> None:
    server = EmbeddedPostgres()  # in a folder that its own user may enter
    url = server.start()
    up = Up(tmp_path, free_port, "--no-node", "--postgres", url)
    try:
        up.program.heard("schema brought up to date")
        where = {row["url"].partition("+")[0]: row["url"] for row in up.call("queues")}
        for contract in ("inbox", "plane"):
            assert where[contract].startswith(f"{contract}+postgres")
        wait_until(lambda: up.worked("plane"))
        counted = {row["url"]: row["states"] for row in up.call("queues")}
        assert counted[where["plane"]]["done"]
        assert not list((tmp_path / ".tenure").glob("*.db"))
    finally:
        up.program.kill()
        server.stop()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("import not_installed_anywhere\n", "No module named 'not_installed_anywhere'"),
        ("x = 1\n", "app.py has no tasks"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_of_before_anything_starts(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "app.py").write_text(text)
    program = Program(["up", "app.py"], tmp_path, {})
    assert program.ended() != 0
    assert words in program.words
    assert not (tmp_path / ".tenure").exists()
