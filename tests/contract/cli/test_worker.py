"""`tenure worker` as a process: burst, drain, many processes, metrics, systemd."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tenure.core.job import NewJob
from tenure.core.registry import open_queue
from tests.contract.cli.conftest import Cli, Start, wait_until

APP = """
import time, pathlib
from tenure import task

@task("chat")
def chat(job):
    job.report(1, "begun")
    time.sleep(job.payload.get("seconds", 0))
    return job.payload

@task("embed")
async def embed(job):
    return 1
"""


TALKS = """
import structlog
from tenure import task

@task("talk")
async def talk(job):
    structlog.get_logger("library").info("deep inside")
"""


def app(folder: Path) -> str:
    (folder / "app.py").write_text(APP)
    return "app.py"


def test_burst_works_off_what_is_there_and_ends(cli: Cli, start: Start, tmp_path: Path) -> None:
    for _ in range(5):
        cli("submit", "embed")
    worker = start("worker", app(tmp_path), "--burst")
    assert worker.ended() == 0
    assert cli("queues", "--json").lines[0]["states"]["done"] == 5


def test_the_first_sigterm_lets_a_running_job_finish(
    cli: Cli, start: Start, tmp_path: Path
) -> None:
    worker = start("worker", app(tmp_path))
    job_id = cli("submit", "chat", "-d", '{"seconds": 1}').out.strip()
    # The store says "running" a moment before the handler does; one not begun would be handed back.
    wait_until(lambda: cli("inspect", job_id, "--json").lines[0]["progress"] is not None)
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0
    assert cli("inspect", job_id, "--json").lines[0]["state"] == "done"


def test_many_processes_serve_as_one_and_a_killed_one_comes_back(
    cli: Cli, start: Start, tmp_path: Path
) -> None:
    herd = start("worker", app(tmp_path), "--processes", "2", "--concurrency", "1")
    herd.heard("worker starts", count=2)
    child = _children(herd.process.pid)[0]
    os.kill(child, signal.SIGKILL)
    herd.heard("was ended by SIGKILL: starting it again")
    herd.heard("worker starts", count=3)
    assert cli("submit", "embed", "--wait", "--timeout", "30").code == 0
    children = _children(herd.process.pid)
    herd.signal(signal.SIGTERM)
    assert herd.ended() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_many_processes_end_by_themselves_in_burst(cli: Cli, start: Start, tmp_path: Path) -> None:
    for _ in range(20):
        cli("submit", "embed")
    herd = start("worker", app(tmp_path), "--processes", "2", "--burst")
    assert herd.ended() == 0
    assert cli("queues", "--json").lines[0]["states"]["done"] == 20


def test_metrics_are_served_on_loopback(
    cli: Cli, start: Start, tmp_path: Path, free_port: int
) -> None:
    start("worker", app(tmp_path), "--metrics-port", str(free_port)).heard("worker starts")
    assert cli("submit", "embed", "--wait", "--timeout", "30").code == 0
    connection = http.client.HTTPConnection("127.0.0.1", free_port, timeout=5)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    assert re.search(r'jobs_finished_total\{.*task="embed".*\} 1', text)
    busy = start("worker", "app.py", "--metrics-port", str(free_port))
    assert busy.ended() == 2
    assert "choose a free one" in busy.words


def test_systemd_is_told_ready_watchdog_and_stopping(start: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(40)
        said = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
        for command in (["worker", app(tmp_path)], ["worker", "app.py", "--processes", "2"]):
            worker = start(*command, **said)
            await_word(supervisor, b"READY=1")
            await_word(supervisor, b"WATCHDOG=1")
            worker.signal(signal.SIGTERM)
            await_word(supervisor, b"STOPPING=1")
            assert worker.ended() == 0


def await_word(supervisor: socket.socket, word: bytes) -> None:
    while word not in supervisor.recv(1000):
        pass


def test_a_lease_time_and_several_queues_can_be_given(
    cli: Cli, start: Start, tmp_path: Path, queue_url: str
) -> None:
    other = queue_url.replace("namespace=", "namespace=o")
    worker = start(
        "worker", app(tmp_path), "--queue", queue_url, "--queue", other, "--lease-ms", "3000"
    )
    worker.heard("worker starts")
    for url in (queue_url, other):
        assert cli("submit", "embed", "--queue", url, "--wait", "--timeout", "30").code == 0
    job_id = cli("submit", "chat", "-d", '{"seconds": 2}').out.strip()
    wait_until(lambda: cli("inspect", job_id, "--json").lines[0]["state"] == "running")
    job = cli("inspect", job_id, "--json").lines[0]
    assert 0 < job["lease_until_ms"] - job["updated_ms"] <= 3000


def test_what_a_handler_logs_carries_the_ids_of_its_job(
    cli: Cli, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "talks.py").write_text(TALKS)
    worker = start("worker", "talks.py")
    job_id = cli("submit", "talk").out.strip()
    line = json.loads(worker.heard("deep inside"))
    assert (line["job_id"], line["attempt"], line["level"]) == (job_id, 1, "info")
    assert "ts" in line


def test_a_worker_without_tasks_says_what_is_missing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    worker = start("worker", "empty.py")
    assert worker.ended() == 2
    right = 'decorate a function with @task("name") (from tenure import task)'
    assert worker.err == [f"tenure: empty.py has no tasks; {right}"]


def test_a_broken_app_says_so_in_one_line_and_shows_more_on_demand(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    worker = start("worker", "broken.py")
    assert worker.ended() == 1
    assert worker.err == [
        "tenure: ZeroDivisionError: division by zero (TENURE_DEBUG=1 shows where)"
    ]
    shown = start("worker", "broken.py", TENURE_DEBUG="1")
    assert shown.ended() == 1
    assert 'broken.py", line 1' in shown.words


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_spans_of_attempts_reach_a_collector_linked_to_their_producer(
    start: Start, cli: Cli, tmp_path: Path, queue_url: str
) -> None:
    taken: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Quiet."""

    (tmp_path / "app.py").write_text(
        'from tenure import task\n\n\n@task("greet")\ndef greet(job):\n    return 1\n'
    )
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    put_in(
        queue_url, NewJob(task="greet", payload=b"{}", trace=f"00-{trace_id}-b7ad6b7169203331-01")
    )
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        collector = f"http://127.0.0.1:{server.server_port}"
        worker = start("worker", "app.py", "--burst", TENURE_WORKER_OTLP_URL=collector)
        assert worker.ended() == 0, worker.words
        server.shutdown()
    spans = [
        span
        for body in taken
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    (span,) = spans
    assert span.kind == span.SPAN_KIND_CONSUMER
    assert [link.trace_id.hex() for link in span.links] == [trace_id]


def put_in(url: str, job: NewJob) -> None:
    async def put() -> None:
        queue = open_queue(url)
        try:
            assert [made.accepted for made in await queue.submit([job])] == [True]
        finally:
            await queue.close()

    asyncio.run(put())


def answer(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_health_is_served_beside_the_metrics_on_the_address_that_was_chosen(
    cli: Cli, start: Start, tmp_path: Path, free_port: int
) -> None:
    command = ("worker", app(tmp_path), "--metrics-host", "127.0.0.2")
    worker = start(*command, "--metrics-port", str(free_port))
    worker.heard("worker starts")

    def ready() -> bool:
        return answer(free_port, "/readyz", "127.0.0.2")[0] == 200

    wait_until(ready)
    assert cli("submit", "embed", "--wait", "--timeout", "30").code == 0
    status, body = answer(free_port, "/livez", "127.0.0.2")
    health = json.loads(body)
    assert (status, health["slots_used"], health["slots_total"]) == (200, 0, 100)
    assert health["stores"] == {"streams": True}
    status, page = answer(free_port, "/metrics", "127.0.0.2")
    assert status == 200
    assert re.search(r'jobs_finished_total\{.*queue="streams".*\} 1', page)
    assert "tenure_slots_used 0.0" in page
    assert answer(free_port, "/", "127.0.0.2")[0] == 404
    with pytest.raises(ConnectionRefusedError):
        answer(free_port, "/livez")


def test_connections_that_ask_nothing_cost_a_worker_little_and_keep_no_probe_waiting(
    start: Start, tmp_path: Path, free_port: int
) -> None:
    worker = start("worker", app(tmp_path), "--metrics-port", str(free_port))
    worker.heard("worker starts")
    with ExitStack() as opened:
        for number in range(200):
            peer = socket.create_connection(("127.0.0.1", free_port), timeout=30)
            opened.enter_context(peer)
            peer.sendall(b"GET /livez HTTP/1.1\r\n")
            if not number:
                first = peer
        assert first.recv(100) == b"", "the longest open connection is ended"
        assert answer(free_port, "/livez")[0] == 200
        threads = Path(f"/proc/{worker.process.pid}/task")
        wait_until(lambda: len(list(threads.iterdir())) < 100)
    assert answer(free_port, "/livez")[0] == 200


def test_a_worker_that_drains_is_live_but_not_ready(
    cli: Cli, start: Start, tmp_path: Path, free_port: int
) -> None:
    worker = start("worker", app(tmp_path), "--metrics-port", str(free_port))
    job_id = cli("submit", "chat", "-d", '{"seconds": 3}').out.strip()
    wait_until(lambda: cli("inspect", job_id, "--json").lines[0]["progress"] is not None)
    assert answer(free_port, "/readyz")[0] == 200
    worker.signal(signal.SIGTERM)
    wait_until(lambda: answer(free_port, "/readyz")[0] == 503)
    status, body = answer(free_port, "/livez")
    health = json.loads(body)
    assert (status, health["state"], health["slots_used"]) == (200, "draining", 1)
    assert worker.ended() == 0


RELOADED = """
from tenure import task

@task("greet")
async def greet(job):
    return "{}"
"""


def test_a_worker_starts_again_when_its_code_changes_and_survives_broken_code(
    cli: Cli, start: Start, tmp_path: Path
) -> None:
    def greeted() -> str:
        return cli("submit", "greet", "--wait", "--timeout", "30", "--json").out

    code = tmp_path / "app.py"
    code.write_text(RELOADED.format("first"))
    worker = start("worker", "app.py", "--reload", "--concurrency", "3")
    worker.heard("worker starts")
    assert "first" in greeted()
    code.write_text("this is no Python")
    worker.heard("app.py changed: starting the worker again")
    worker.heard("SyntaxError")
    code.write_text(RELOADED.format("second"))
    worker.heard("worker starts", count=2)
    assert "second" in greeted()
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0


WITH_STATE = """
from contextlib import asynccontextmanager
from tenure import task

@asynccontextmanager
async def models():
    yield "loaded"

async def shout(attempt, call_next):
    return (await call_next(attempt)).upper()

@task("state")
async def state(job):
    return job.state
"""


def test_lifespan_and_middleware_are_named_on_the_command_line(
    cli: Cli, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(WITH_STATE)
    worker = start("worker", "app.py", "--lifespan", "app:models", "--middleware", "app:shout")
    worker.heard("worker starts")
    assert "LOADED" in cli("submit", "state", "--wait", "--timeout", "30", "--json").out
    wrong = start("worker", "app.py", "--lifespan", "app:modles")
    assert wrong.ended() == 2
    assert "such as app:lifespan" in wrong.words


TALKS_BY_LOGGING = """
import logging
SET_UP
from tenure import task

@task("talk")
def talk(job):
    logging.getLogger("library").info("deep inside")
    raise ValueError("broken")
"""


def test_a_handler_may_use_logging_and_an_application_may_set_it_up(
    cli: Cli, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "talks.py").write_text(TALKS_BY_LOGGING.replace("SET_UP", ""))
    worker = start("worker", "talks.py")
    job_id = cli("submit", "talk").out.strip()
    line = json.loads(worker.heard("deep inside"))
    assert (line["job_id"], line["logger"], line["level"]) == (job_id, "library", "info")
    failed = json.loads(worker.heard("job failed"))
    assert (failed["job_id"], failed["queue"]) == (job_id, "streams")
    assert "ValueError: broken" in failed["exception"]
    worker.signal(signal.SIGTERM)
    assert worker.ended() == 0
    own = 'logging.basicConfig(level="INFO", format="OWN %(message)s")'
    (tmp_path / "talks.py").write_text(TALKS_BY_LOGGING.replace("SET_UP", own))
    worker = start("worker", "talks.py")
    cli("submit", "talk")
    assert worker.heard("deep inside") == "OWN deep inside"
    assert worker.heard("job failed").startswith("OWN job failed: talk ")
