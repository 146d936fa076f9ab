"""`leasehold up` whole: a store, a gateway, a worker, samples, and an orderly end."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leasehold.cli.samples import FLOWS
from leasehold.ledger.migrating import known
from leasehold.ledger.sqlite_migrations import SqliteMigrations
from leasehold.store.embedded import EmbeddedPostgres
from tests.contract.cli.conftest import Program, wait_until
from tests.unit.tasks.model_server import model_server

TASKS = {"chat", "plan", "code", "tool", "rag", "embed"}


class Up:
    """A running `leasehold up` and the folder it lives in."""

    def __init__(self, folder: Path, port: int, *args: str, **environment: str) -> None:
        self.folder, self.port = folder, port
        self.program = self.start(*args, **environment)

    def start(self, *args: str, **environment: str) -> Program:
        begin = time.monotonic()
        self.program = Program(["up", "--port", str(self.port), *args], self.folder, environment)
        self.program.heard("leasehold is up")
        self.seconds = time.monotonic() - begin
        return self.program

    def call(self, *args: str) -> list[Any]:
        """A reading command, run in the same folder: it finds the queue by itself."""
        reader = Program([*args, "--json"], self.folder, {})
        assert reader.ended() == 0, reader.words
        return [json.loads(line) for line in reader.out]

    def get(self, path: str) -> tuple[int, Any]:
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: Any = None, port: int = 0) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=10)
        sent = () if body is None else (json.dumps(body), {"Content-Type": "application/json"})
        try:
            connection.request(method, path, *sent)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException):
            return 0, {}
        finally:
            connection.close()

    def videos(self) -> list[str]:
        """Who added the finished jobs of the BullMQ queue, oldest first."""
        url = self.call("queues")[1]["queue"]
        jobs = self.call("ls", "--queue", url, "--state", "completed", "--limit", "500")
        return [job["payload"]["userId"] for job in jobs if job["result"]["sample"]]

    @property
    def receiver_url(self) -> str:
        """Where it said that webhooks are shown."""
        return str(re.findall(r"see webhooks +(http://127\.0\.0\.1:\d+)/", self.program.words)[0])

    def webhooks(self, job_id: str) -> list[str]:
        """What verified webhooks said of a job, one after the other; no webhook was refused."""
        port = int(self.receiver_url.rpartition(":")[2])
        _, shown = self.ask("GET", "/deliveries", port=port)
        assert {each["verdict"] for each in shown} <= {"verified", "repeated"}
        verified = [each for each in shown if each["verdict"] == "verified"]
        return [each["status"] for each in reversed(verified) if each["job_id"] == job_id]

    def totals(self) -> dict[str, int]:
        return dict(self.call("queues")[0]["totals"])


@pytest.fixture
def up(tmp_path: Path, free_port: int) -> Iterator[Up]:
    up = Up(tmp_path, free_port, "--no-node")
    yield up
    up.program.kill()


def children(pid: int, word: str) -> list[int]:
    """Of every thread: the store is started by one of its own."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(child) for file in files for child in file.read_text().split()]
    return [p for p in pids if word in Path(f"/proc/{p}/cmdline").read_bytes().decode()]


def test_jobs_of_all_six_tasks_flow_within_a_minute_and_ctrl_c_drains(up: Up) -> None:
    assert up.seconds < 30
    text = "\n".join(up.program.out)
    assert f"http://127.0.0.1:{up.port}/v1/jobs" in text
    assert text.count("curl -s") == 3

    def done_tasks() -> set[str]:
        return {job["task"] for job in up.call("ls", "--state", "done", "--limit", "500")}

    wait_until(lambda: done_tasks() == TASKS, within_s=60)
    results = up.call("ls", "--state", "done", "--limit", "1")
    assert results[0]["result"]["sample"] is True
    parts = children(up.program.process.pid, "")
    up.program.signal(signal.SIGINT)
    assert up.program.ended() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in parts)
    assert not (up.folder / ".leasehold" / "up.json").exists()
    assert "stopped; the data stay in" in up.program.words


def test_a_bullmq_queue_is_fed_by_us_and_worked_by_the_same_worker_without_node(up: Up) -> None:
    up.program.heard("(--no-node): the jobs of 'video-generation' come from our own producer")
    wait_until(lambda: [each["workers"] for each in up.call("queues")] == [1] * len(FLOWS))
    wait_until(lambda: len(up.videos()) >= 2)
    assert set(up.videos()) == {"sample-python"}
    assert not (up.folder / ".leasehold" / "samples").exists()


def test_an_omniq_queue_with_groups_is_fed_and_worked_by_the_same_worker(up: Up) -> None:
    url = up.call("queues")[2]["queue"]
    assert url.startswith("omniq+")

    def letters() -> list[Any]:
        return up.call("ls", "--queue", url, "--state", "completed", "--limit", "500")

    wait_until(lambda: len(letters()) >= 2)
    assert all(job["result"]["tenant"] == job["gid"] for job in letters())


def test_node_s_own_bullmq_takes_over_when_npm_has_brought_it(
    tmp_path: Path, free_port: int
) -> None:
    up = Up(tmp_path, free_port)
    try:
        assert up.seconds < 30
        up.program.heard("npm brings bullmq 6.7.0")
        up.program.heard("Node's own bullmq 6.7.0 adds the jobs", within_s=100)
        up.program.heard("completed, by a Python worker")
        wait_until(lambda: "sample-node" in up.videos())
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
        wait_until(up.videos)
        assert list((tmp_path / ".leasehold" / "samples").iterdir()) == []
    finally:
        up.program.kill()


def test_the_gateway_is_a_plane_whose_jobs_are_worked_over_http(up: Up) -> None:
    def done() -> int:
        (plane,) = [each for each in up.call("queues") if each["queue"].startswith("plane+")]
        return int(plane["totals"].get("SUCCEEDED", 0))

    wait_until(lambda: done() >= 2, within_s=60)


def test_a_transcode_succeeds_and_its_webhooks_arrive_verified(up: Up) -> None:
    ring = up.folder / ".leasehold" / "vault.keys"
    assert ring.stat().st_mode & 0o777 == 0o600
    url = next(each["queue"] for each in up.call("queues") if each["queue"].startswith("inbox+"))

    def transcoded() -> list[Any]:
        return up.call("ls", "--queue", url, "--state", "succeeded")

    wait_until(transcoded, within_s=60)
    wait_until(lambda: up.webhooks(transcoded()[-1]["job_id"])[-1:] == ["succeeded"])

    clip = (up.folder / ".leasehold" / "transcode" / "clip.mp4").as_uri()
    asked = {
        "source": {"url": clip},
        "outputs": [{"name": "poster.jpg", "format": "jpg"}],
        "destination": {"url": clip.replace("clip.mp4", "mine")},
        "status_webhook_url": f"{up.receiver_url}/hooks",
    }
    status, job = up.ask("POST", "/transcode", asked)
    assert status == 202, job
    path = f"/transcode/status?job_id={job['job_id']}"
    wait_until(lambda: up.get(path)[1].get("status") == "succeeded", within_s=60)
    told = ["claimed", "fetching", "processing", "uploading", "succeeded"]
    wait_until(lambda: up.webhooks(job["job_id"]) == told)
    (made,) = up.get(path)[1]["outputs"]["outputs"]
    assert (up.folder / ".leasehold" / "transcode" / made["key"]).stat().st_size == made["bytes"]


def test_no_samples_serves_what_an_earlier_version_left_and_feeds_nothing(
    tmp_path: Path, free_port: int
) -> None:
    earlier = tmp_path / ".leasehold" / "inbox.db"
    earlier.parent.mkdir(mode=0o700)
    for step in known("sqlite")[:-1]:
        asyncio.run(SqliteMigrations(earlier).apply(*step))
    up = Up(tmp_path, free_port, "--no-samples")
    try:
        number, name, *_ = known("sqlite")[-1]
        assert f"schema brought up to date ({number:04}_{name})" in up.program.words
        url = up.call("queues")[1]["queue"]
        args = ["submit", "video-generation", "-d", "{}", "--queue", url, "--json"]
        asked = Program([*args, "--wait", "--timeout", "30"], tmp_path, {})
        asked.ended()
        assert "payload.videoId is missing" in asked.words
        assert up.totals() == {}
        assert len(up.call("ls", "--queue", url)) == 1
        assert not (tmp_path / ".leasehold" / "samples").exists()
        assert not (tmp_path / ".leasehold" / "transcode").exists()
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
        wait_until(up.totals)
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


def test_a_second_up_in_the_same_folder_is_told_of_the_first(up: Up) -> None:
    second = Program(["up", "--port", str(up.port + 1)], up.folder, {})
    assert second.ended() == 4
    assert re.search(r"already runs here \(pid \d+, http://127", second.words)
    elsewhere = Program(["up", "--port", str(up.port), "--data", "other"], up.folder, {})
    assert elsewhere.ended() == 4
    assert f"leasehold up --port {up.port + 1}" in elsewhere.words


def test_a_taken_port_names_the_remedy_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused = Program(["up", "--port", str(port)], tmp_path, {})
        assert refused.ended() == 4
    assert f"choose another: leasehold up --port {port + 1}" in refused.words
    assert not (tmp_path / ".leasehold").exists()


def test_a_task_with_a_real_model_gets_no_samples(tmp_path: Path, free_port: int) -> None:
    with model_server() as script:
        program = Program(
            ["up", "--port", str(free_port), "--no-node"],
            tmp_path,
            {"LEASEHOLD_LLM_URL": script.url},
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
        program.heard("leasehold is up")
        assert not (tmp_path / ".leasehold" / "redis").exists()
        program.signal(signal.SIGTERM)
        assert program.ended() == 0
    finally:
        program.kill()
    ping = Program(["queues", f"streams+{redis_url}"], tmp_path, {})
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
        (plane,) = [each for each in up.call("queues") if each["queue"].startswith("plane+")]
        return int(plane["totals"].get("SUCCEEDED", 0))

    key = up.folder / ".leasehold" / "worker.key"
    assert key.stat().st_mode & 0o777 == 0o600
    up.call("keys", "create", "somebody")
    wait_until(lambda: up.ask("POST", "/v1/jobs", {"task": "chat", "payload": {}})[0] == 401)
    before = done()
    wait_until(lambda: done() >= before + 2, within_s=60)


def test_with_a_postgres_the_sql_contracts_keep_their_jobs_there(
    tmp_path: Path, free_port: int
) -> None:
    server = EmbeddedPostgres()  # in a folder that its own user may enter
    url = server.start()
    up = Up(tmp_path, free_port, "--no-node", "--postgres", url)
    try:
        up.program.heard("schema brought up to date")
        where = {row["queue"].partition("+")[0]: row["queue"] for row in up.call("queues")}
        for contract in ("inbox", "plane"):
            assert where[contract].startswith(f"{contract}+postgres")

        def worked() -> bool:
            counted = {row["queue"]: row["states"] for row in up.call("queues")}
            return bool(counted[where["plane"]]["SUCCEEDED"])

        wait_until(worked)
        assert not list((tmp_path / ".leasehold").glob("*.db"))
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
    assert not (tmp_path / ".leasehold").exists()
