"""A failed attempt is logged, by logging and structlog; an application's set-up is left alone."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import sentry_sdk
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from tenure import Cancel, Fatal, Job, RetryPolicy, Snooze, sentry_scope, task
from tenure.testing import serving
from tenure.worker.telemetry import Tracer, configure_logs
from tests.unit.worker import process_tasks as child
from tests.waiting import until


@pytest.fixture(autouse=True)
def fresh_logging() -> Iterator[None]:
    """Structlog as a new process has it; afterwards logging as it was."""
    root, level = logging.root.handlers[:], logging.root.level
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    logging.root.handlers[:] = root
    logging.root.setLevel(level)
    logging.getLogger("tenure").setLevel(logging.NOTSET)


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.exc_info or "failed" in each.getMessage()]


@task("break", retry=RetryPolicy(max_attempts=2, delay_ms=1))
async def breaking(job: Job) -> None:
    raise ValueError("no bread")


@task("slow", timeout_s=0.01)
async def slow(job: Job) -> None:
    await job.log("begun")
    await until(lambda: False)


@task("odd")
async def odd(job: Job) -> object:
    return object()


async def ended(*tasks: Any, name: str, **given: Any) -> None:
    """Run one job of this name to its end."""
    async with serving(*tasks, **given) as queue:
        handle = await queue.client.submit(name, {})
        await handle.wait(timeout_s=20)


async def test_a_retried_attempt_is_a_warning_and_the_last_one_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await ended(breaking, name="break")
    first, last = told(caplog)
    assert (first.levelname, last.levelname) == ("WARNING", "ERROR")
    assert (first.tenure_attempt, last.tenure_attempt) == (1, 2)  # type: ignore[attr-defined]
    for record in (first, last):
        assert record.exc_info is not None
        assert isinstance(record.exc_info[1], ValueError)
        assert record.exc_info[2] is not None
        text = record.getMessage()
        for part in ("break", record.tenure_job_id, "queue memory", "no bread"):  # type: ignore[attr-defined]
            assert part in text


@pytest.mark.parametrize(
    ("task", "says"), [(slow, "timeout"), (odd, "result_not_json")], ids=["timeout", "not json"]
)
async def test_a_failure_without_an_error_of_the_handler_is_logged_too(
    task: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    await ended(task, name=task.name, max_attempts=1)
    (record,) = told(caplog)
    assert record.levelname == "ERROR"
    assert says in record.getMessage()


@task("escape")
async def escaping(job: Job) -> None:
    raise ValueError("\x1b]0;owned\x07\r\nforged line \u202e")


async def test_what_a_terminal_would_obey_is_escaped_for_the_log_of_an_application(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await ended(escaping, name="escape", max_attempts=1)
    (record,) = told(caplog)
    assert record.getMessage().isprintable()
    assert "ValueError: \\x1b]0;owned\\x07\\r\\nforged line \\u202e" in record.getMessage()


async def test_what_is_no_failure_is_not_logged_as_one(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    @task("later")
    async def later(job: Job) -> None:
        seen.append(1)
        if len(seen) == 1:
            raise Snooze(0.001)
        raise Cancel

    await ended(later, name="later")
    assert len(seen) == 2
    assert told(caplog) == []


async def test_an_unknown_task_ends_in_a_line_that_names_the_nearest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(breaking) as queue:
        handle = await queue.client.submit("brake", {}, ttl_s=1)
        await handle.wait(timeout_s=20)
    record = told(caplog)[-1]
    assert record.levelname == "ERROR"
    assert "did you mean 'break'?" in record.getMessage()


async def test_a_failure_in_a_process_has_the_traceback_of_the_child(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await ended(child.broken, name="broken", max_attempts=1)
    (record,) = told(caplog)
    assert record.exc_info is not None
    text = logging.Formatter().formatException(record.exc_info)
    assert "in broken" in text
    assert "ZeroDivisionError: division by zero" in text


async def test_an_application_that_uses_structlog_alone_gets_the_line_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines: list[Any] = []

    def keep(_logger: Any, _method: str, line: Any) -> str:
        lines.append(dict(line))
        return ""

    structlog.configure(
        processors=[structlog.processors.add_log_level, keep],
        logger_factory=structlog.PrintLoggerFactory(io.StringIO()),
    )
    await ended(breaking, name="break")
    failed = [line for line in lines if "exc_info" in line]
    assert [(line["level"], line["attempt"]) for line in failed] == [("warning", 1), ("error", 2)]
    assert {"job_id", "task", "queue"} <= failed[0].keys()
    assert isinstance(failed[0]["exc_info"], ValueError)
    assert len(told(caplog)) == 2  # and by logging, for its integrations


async def test_a_broken_log_of_the_application_does_not_stop_the_worker() -> None:
    def broken(_logger: Any, _method: str, line: Any) -> str:
        if "exc_info" in line:
            raise KeyError("exc_info")
        return ""

    structlog.configure(
        processors=[broken], logger_factory=structlog.PrintLoggerFactory(io.StringIO())
    )
    await ended(breaking, name="break")


class LocalTransport(Transport):
    """Keeps what Sentry would send."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        event = envelope.get_event()
        if event is not None:
            self.events.append(event)


@pytest.fixture
def sentry() -> Iterator[LocalTransport]:
    transport = LocalTransport()
    sentry_sdk.init(
        "http://key@localhost/1", transport=transport, default_integrations=True,
        auto_enabling_integrations=False,
    )  # fmt: skip
    yield transport
    sentry_sdk.get_client().close()
    sentry_sdk.get_global_scope().set_client(None)


async def test_sentry_receives_one_event_with_the_traceback_of_the_job(
    sentry: LocalTransport,
) -> None:
    await ended(breaking, name="break")
    (event,) = sentry.events
    assert event["level"] == "error"
    (error,) = event["exception"]["values"]
    assert (error["type"], error["value"]) == ("ValueError", "no bread")
    assert error["stacktrace"]["frames"][-1]["function"] == "breaking"
    assert event["extra"]["tenure_task"] == "break"
    assert event["extra"]["tenure_job_id"] in event["logentry"]["formatted"]


async def test_the_middleware_for_sentry_gives_each_attempt_a_scope_with_its_ids(
    sentry: LocalTransport,
) -> None:
    @task("tagged")
    async def tagged(job: Job) -> None:
        sentry_sdk.set_tag("order", "17")
        raise Fatal("over")

    @task("thread")
    def in_thread(job: Job) -> None:
        raise Fatal("over")

    for each in (tagged, in_thread, child.broken):
        given = {"middleware": [sentry_scope], "max_attempts": 1}
        await ended(each, name=each.name, **given)
        event = sentry.events.pop()
        assert event["tags"]["tenure.task"] == each.name
        assert event["tags"]["tenure.job_id"] == event["extra"]["tenure_job_id"]
        assert event["transaction"] == each.name
        assert event["tags"].get("order") == ("17" if each is tagged else None)
    assert sentry.events == []


async def test_a_span_has_the_error_of_its_attempt() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with serving(breaking) as queue:
        await queue.worker.watch.until("ready")
        queue.worker._executor._tracer = Tracer("w", provider)
        handle = await queue.client.submit("break", {})
        await handle.wait(timeout_s=20)
    for span in exporter.get_finished_spans():
        assert (span.status.status_code.name, span.status.description) == ("ERROR", "ValueError")
        (event,) = span.events
        assert event.attributes is not None
        assert event.attributes["exception.type"] == "ValueError"
        assert "in breaking" in str(event.attributes["exception.stacktrace"])


async def test_lines_of_a_handler_by_logging_carry_its_ids_and_keep_their_levels() -> None:
    out = io.StringIO()
    logging.getLogger("app.quiet").setLevel(logging.WARNING)

    @task("talk")
    async def talk(job: Job) -> None:
        logging.getLogger("app").info("as usual", extra={"job_id": "mine", "task": "mine"})
        logging.getLogger("app").debug("too much")
        logging.getLogger("app.quiet").info("not wanted")

    @task("thread")
    def in_thread(job: Job) -> None:
        logging.getLogger("app").info("in a thread")

    configure_logs(stream=out, json=True, others="info")
    await ended(talk, name="talk")
    await ended(in_thread, name="thread")
    lines = {line["event"]: line for line in map(json.loads, out.getvalue().splitlines())}
    for event, name in (("as usual", "talk"), ("in a thread", "thread")):
        line = lines[event]
        assert (line["task"], line["queue"], line["attempt"]) == (name, "memory", 1)
        assert (line["level"], line["logger"]) == ("info", "app")
        assert len(line["job_id"]) > 10
    assert not {"too much", "not wanted"} & lines.keys()


APP = """
import asyncio, logging, sys
SET_UP
from tenure import Worker, task
from tests.unit.worker import process_tasks
@task("talk")
async def talk(job):
    logging.getLogger("app").info("about %s", job.id)
@task("bad")
async def bad(job):
    raise ValueError("broken")
async def main():
    from tenure import Client
    tasks = [talk, bad, process_tasks.talking]
    worker = Worker(tasks, queues=["memory://a?max_attempts=1"])
    async with Client("memory://a?max_attempts=1") as client:
        serving = asyncio.create_task(worker.serve())
        for each in tasks:
            handle = await client.submit(each.name, {}, id=each.name + "-1")
            await handle.wait(timeout_s=60)
    worker.stop()
    await serving
asyncio.run(main())
"""


def lines_of(set_up: str) -> list[str]:
    """What a program with this set-up of its logging writes to stderr."""
    code = APP.replace("SET_UP", set_up)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_an_application_without_logging_sees_all_lines_with_the_ids() -> None:
    lines = list(map(json.loads, lines_of("")))
    by_event = {line["event"]: line for line in lines}
    assert by_event["about talk-1"]["job_id"] == "talk-1"
    assert by_event["in the child"]["job_id"] == "talking-1"
    failed = by_event["job failed"]
    assert (failed["job_id"], failed["task"], failed["level"]) == ("bad-1", "bad", "error")
    assert "in bad" in failed["exception"]


def test_the_logging_of_an_application_is_left_alone() -> None:
    set_up = """
class Mine(logging.Formatter):
    def formatException(self, exc_info): return "|".join(["E", repr(exc_info[1])])
handler = logging.StreamHandler()
handler.setFormatter(Mine("MINE %(levelname)s [%(tenure_job_id)s] %(message)s"))
logging.basicConfig(level=logging.INFO, handlers=[handler])
"""
    lines = lines_of(set_up)
    assert "MINE INFO [talk-1] about talk-1" in lines
    assert any(line.startswith("MINE INFO [] worker starts worker_id=") for line in lines)
    at = next(n for n, line in enumerate(lines) if line.startswith("MINE ERROR [bad-1] job failed"))
    assert lines[at + 1] == "E|ValueError('broken')"
