"""What a worker tells about itself: metrics, spans, logs, service manager, health."""

import asyncio
import io
import json
import logging
import socket
from pathlib import Path

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from tenure.core.job import NewJob
from tenure.core.lease import Lease
from tenure.core.registry import open_queue
from tenure.core.seam import Quarantined, QueueFeatures
from tenure.worker import Job, Settings, Worker, task
from tenure.worker.events import Buckets, Notifier
from tenure.worker.job import Attempt
from tenure.worker.telemetry import Tracer, configure_logs
from tests.unit.worker.seam import Store, View, serving
from tests.waiting import until


@task("ok")
async def ok(job: Job) -> int:
    return 1


@task("bad")
async def bad(job: Job) -> None:
    raise ValueError("no")


async def test_every_queue_is_told_how_many_jobs_the_worker_runs_at_once() -> None:
    told: list[View] = []

    def opened() -> View:
        told.append(View(Store()))
        return told[-1]

    await Worker([ok], queues=[opened, opened], concurrency=7, burst=True).serve()
    assert [view.slots for view in told if view.slots] == [7, 7]


async def test_metrics_count_starts_outcomes_retries_waits_and_runs() -> None:
    store = Store()
    store.add("ok", 3)
    store.add("bad", 2)
    registry = CollectorRegistry()
    worker = Worker([ok, bad], queues=[store.open], registry=registry, burst=True)
    await worker.serve()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tenure_{name}", {"queue": "open", **labels})

    assert worker.registry is registry
    assert value("jobs_started_total", task="ok") == 3
    assert value("jobs_finished_total", task="ok", outcome="completed") == 3
    assert value("jobs_finished_total", task="bad", outcome="retried") == 2
    assert value("jobs_retried_total", task="bad") == 2
    assert value("lease_lost_total", task="ok") == 0
    assert value("job_wait_seconds_count", task="ok") == 3
    assert value("job_wait_seconds_sum", task="ok") == 3.0  # one second each, on the store's clock
    assert value("job_run_seconds_count", task="ok") == 3
    assert registry.get_sample_value("tenure_slots") == 100
    assert registry.get_sample_value("tenure_slots_used") == 0
    assert b"# TYPE tenure_job_run_seconds histogram" in generate_latest(registry)


async def test_an_idle_worker_uses_no_slot_although_its_claim_could_fill_half_of_them() -> None:
    store = Store()
    registry = CollectorRegistry()
    worker = Worker([ok], queues=[store.open], registry=registry)
    async with serving(worker):
        await until(lambda: worker._slots.used == 50)
        assert registry.get_sample_value("tenure_slots_used") == 0
        assert worker.health().slots_used == 0


async def test_the_queue_has_the_name_that_gateway_and_command_line_have_for_it() -> None:
    registry = CollectorRegistry()
    urls = ["memory://names", "memory://others"]
    for url in urls:
        queue = open_queue(url)
        await queue.submit([NewJob(task="ok", payload=b"{}")])
    worker = Worker([ok], queues=urls, registry=registry, burst=True)
    await worker.serve()
    assert list(worker.health().stores) == ["memory", "memory~2"]
    for name in ("memory", "memory~2"):
        labels = {"queue": name, "task": "ok", "outcome": "completed"}
        assert registry.get_sample_value("tenure_jobs_finished_total", labels) == 1


async def test_a_record_set_aside_by_a_queue_is_logged_with_its_id_and_counted() -> None:
    store = Store()
    store.add("ok", 2)

    bad = [Quarantined("bad-1", "job:bad-1 is a string"), Quarantined("bad-2", "no job_id")]

    class SettingAside(View):
        @property
        def features(self) -> QueueFeatures:  # type: ignore[override]
            return QueueFeatures(take_quarantined=self.take_quarantined)

        def take_quarantined(self) -> list[Quarantined]:
            taken, bad[:] = list(bad), []
            return taken

    registry = CollectorRegistry()
    with structlog.testing.capture_logs() as lines:
        worker = Worker([ok], queues=[lambda: SettingAside(store)], registry=registry, burst=True)
        await worker.serve()
    noted = [line for line in lines if line["event"] == "record_quarantined"]
    assert [(line["job_id"], line["reason"], line["log_level"]) for line in noted] == [
        ("bad-1", "job:bad-1 is a string", "warning"),
        ("bad-2", "no job_id", "warning"),
    ]
    queue = noted[0]["queue"]
    assert registry.get_sample_value("tenure_quarantined_total", {"queue": queue}) == 2
    assert len(store.outcomes) == 2


def test_a_histogram_counts_a_value_in_every_bucket_above_it() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        buckets.observe(value)
    assert buckets.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert buckets.total == 12.0


PRODUCER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def _traced(trace: str, fail: bool) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer("w1", provider)
    lease = Lease(
        job_id="j1",
        queue="emails",
        task="send",
        payload=b"{}",
        attempt=2,
        max_attempts=3,
        fence=2,
        token="x",
        lease_until_ms=0,
        lease_ms=1000,
        trace=trace,
    )
    attempt = Attempt(lease, 1.0, 0.0, task=ok)

    async def life() -> None:
        from tenure.core.outcome import Failure, Outcome

        failure = Failure(code="ValueError", message="no") if fail else None
        attempt.outcome = Outcome(lease, "fail" if fail else "complete", failure=failure)

    await tracer.trace(attempt, life)
    return exporter


async def test_an_attempt_is_a_consumer_span_linked_to_its_producer() -> None:
    (span,) = (await _traced(PRODUCER, fail=False)).get_finished_spans()
    assert (span.name, span.kind.name) == ("process emails", "CONSUMER")
    assert span.attributes is not None
    assert span.attributes["messaging.message.id"] == "j1"
    assert span.attributes["tenure.outcome"] == "complete"
    assert f"{span.links[0].context.trace_id:032x}" == PRODUCER.split("-")[1]
    assert f"{span.links[0].context.span_id:016x}" == PRODUCER.split("-")[2]


@pytest.mark.parametrize("trace", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-00"])
async def test_a_trace_context_that_cannot_be_read_is_no_link(trace: str) -> None:
    (span,) = (await _traced(trace, fail=True)).get_finished_spans()
    assert span.links == ()
    assert span.status.status_code.name == "ERROR"
    assert span.attributes is not None
    assert span.attributes["error.type"] == "ValueError"


async def test_a_traced_worker_runs_its_jobs_in_spans() -> None:
    store = Store()
    store.add("span")
    seen: list[str] = []

    @task("span")
    async def inside(job: Job) -> None:
        from opentelemetry import trace

        seen.append(type(trace.get_current_span()).__name__)

    worker = Worker([inside], queues=[store.open], settings=Settings(tracing=True), burst=True)
    await worker.serve()
    assert store.kinds() == {"span-1": "complete"}
    assert seen


async def test_log_lines_of_a_handler_carry_the_ids_of_its_job() -> None:
    out = io.StringIO()
    store = Store()
    store.add("talk")

    @task("talk")
    async def talk(job: Job) -> None:
        structlog.get_logger("app").info("anywhere below the handler")
        job.log.info("by the job's own logger")

    try:
        configure_logs(stream=out, json=True, others="info")
        worker = Worker([talk], queues=[store.open], settings=Settings(worker_id="w1"), burst=True)
        await worker.serve()
    finally:
        structlog.reset_defaults()
    lines = {line["event"]: line for line in map(json.loads, out.getvalue().splitlines())}
    expected = {
        "job_id": "talk-1",
        "attempt": 1,
        "queue": "open",
        "task": "talk",
        "worker_id": "w1",
    }
    for event in ("anywhere below the handler", "by the job's own logger"):
        assert expected.items() <= lines[event].items()
    assert "job_id" not in lines["worker stopped"]


def test_a_terminal_gets_readable_lines_and_a_pipe_gets_json() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    try:
        for stream, is_json in ((Terminal(), False), (io.StringIO(), True)):
            configure_logs(stream=stream, level="warning")
            structlog.get_logger().warning("hello", n=1)
            structlog.get_logger().info("too quiet")
            assert stream.getvalue().startswith("{") is is_json
            assert "too quiet" not in stream.getvalue()
    finally:
        structlog.reset_defaults()
    assert logging.getLevelName("WARNING") == 30


async def test_systemd_hears_ready_watchdog_and_stopping(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.setblocking(False)
        store = Store()
        settings = Settings(notify_socket=path, watchdog_ms=20)
        worker = Worker([ok], queues=[store.open], settings=settings)
        loop = asyncio.get_running_loop()
        async with serving(worker):
            heard = [await asyncio.wait_for(loop.sock_recv(manager, 100), 5) for _ in range(4)]
            worker.stop()
            while not heard[-1].startswith(b"STOPPING=1"):
                heard.append(await asyncio.wait_for(loop.sock_recv(manager, 100), 5))
    assert any(message.startswith(b"READY=1") for message in heard[:4])
    assert b"WATCHDOG=1" in heard


async def test_systemd_is_told_ready_only_when_every_store_has_answered(tmp_path: Path) -> None:
    from tenure.core.errors import StoreUnreachable

    near, far = Store(name="near"), Store(name="far")
    away = True
    for operation in ("claim", "upkeep"):
        far.before[operation] = lambda _: StoreUnreachable("away") if away else None
    settings = Settings(backoff_ms=1, backoff_ms_max=2, upkeep_ms=10)
    worker = Worker([ok], queues=[near.open, far.open], settings=settings)
    async with serving(worker):
        await worker.watch.until("claim_failed", 3)
        assert not worker.health().ready
        away = False
        await worker.watch.until("ready")
        assert worker.health().ready


async def test_the_watchdog_is_not_fed_when_the_keeper_is_dead(tmp_path: Path) -> None:
    store = Store(lease_ms=100)
    worker = Worker([ok], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("ready")
        assert worker.health().keeper_alive
        assert worker._keeper_thread is not None
        await worker._keeper_thread.stop()
        assert not worker.health().keeper_alive


def test_a_manager_that_does_not_listen_hurts_nobody(tmp_path: Path) -> None:
    notifier = Notifier(str(tmp_path / "nobody"))
    notifier.ready("x")
    notifier.close()
    Notifier("").watchdog()


def test_the_trace_of_a_job_is_named_in_its_log_lines() -> None:
    from tenure.worker.job import job_facts

    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for given, named in ((trace, {"trace_id": trace.split("-")[1]}), ("", {}), ("junk", {})):
        lease = Lease(
            job_id="j1", queue="q", task="t", payload=b"{}", attempt=1, lease_ms=1,
            max_attempts=1, fence=1, token="w", lease_until_ms=0, trace=given,
        )  # fmt: skip
        facts = job_facts(Job(Attempt(lease, 1.0, 0.0), None, "w"))  # type: ignore[arg-type]
        assert {name: facts[name] for name in facts if name == "trace_id"} == named
