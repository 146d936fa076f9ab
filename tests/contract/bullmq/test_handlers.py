"""What a handler may do besides returning and raising: log, rest, wait for children it added."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tenure import Fatal, Job, Park, RateLimit, Retry, Worker, task
from tenure.contracts.bullmq import Flow
from tenure.core.errors import LeaseLost
from tenure.core.lease import Report
from tenure.core.outcome import COMPLETED, RELEASED, Outcome, Retried
from tenure.worker.config import Settings
from tests.contract.bullmq.conftest import Bench
from tests.contract.bullmq.process_tasks import in_a_process, shows_options
from tests.waiting import until


async def worked(bench: Bench, handler: Any, holds: Callable[[], Awaitable[bool]], **options: Any):
    """Let a worker with this handler run until something holds."""
    tasks = handler if isinstance(handler, list) else [handler]
    worker = Worker(
        tasks, queues=[bench.url(**options)], settings=Settings(concurrency=2, claim_wait_ms=50)
    )
    serving = asyncio.create_task(worker.serve())
    try:
        await until(holds)
    finally:
        worker.stop()
        await serving


def ended(bench: Bench, *job_ids: str) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return set(job_ids) <= {*bench.ids("completed"), *bench.ids("failed")}

    return holds


@pytest.mark.clause("B-46")
async def test_a_handler_writes_to_the_log_of_its_job_which_keeps_as_much_as_it_asked(
    bench: Bench,
) -> None:
    @task("work")
    async def handler(job: Job) -> None:
        for n in range(4):
            await job.log(f"zeile {n} \N{SNOWMAN}")
        job.log.info("this goes to the log of the worker")

    job_id = await bench.producer().add("work", keep_logs=2)
    all_kept = await bench.producer().add("work")
    await worked(bench, handler, ended(bench, job_id, all_kept))
    ledger = bench.ledger()
    assert await ledger.logs(job_id) == ["zeile 2 \N{SNOWMAN}", "zeile 3 \N{SNOWMAN}"]
    assert len(await ledger.logs(all_kept)) == 4
    assert "log" not in {event["event"] for event in bench.events()}


@pytest.mark.clause("B-46")
async def test_a_handler_in_a_thread_writes_to_the_log_by_a_plain_call(bench: Bench) -> None:
    @task("work")
    def handler(job: Job) -> None:
        job.log("from a thread")

    job_id = await bench.producer().add("work")
    await worked(bench, handler, ended(bench, job_id))
    assert await bench.ledger().logs(job_id) == ["from a thread"]


@pytest.mark.clause("B-20", "B-21")
async def test_a_retry_counts_as_an_attempt_and_fails_the_job_without_one_left(
    bench: Bench,
) -> None:
    runs: dict[str, int] = {}

    @task("work")
    async def handler(job: Job) -> None:
        runs[job.id] = runs.get(job.id, 0) + 1
        raise Retry(0, "again")

    producer = bench.producer()
    once = await producer.add("work")
    thrice = await producer.add("work", attempts=3)
    await worked(bench, handler, ended(bench, once, thrice))
    assert (runs[once], runs[thrice]) == (1, 3)
    assert bench.hash(once)["failedReason"] == "again"


@pytest.mark.clause("B-51", "B-22")
async def test_a_handler_waits_for_children_that_it_added(bench: Bench) -> None:
    producer, ledger = bench.producer(), bench.ledger()

    @task("*")
    async def handler(job: Job) -> Any:
        if job.task == "scene":
            return job.payload["n"] * 10
        children = await ledger.children(job.id)
        if not children:
            scenes = [Flow(name="scene", data={"n": n}) for n in (1, 2)]
            await producer.add_children(job.id, scenes)
            raise Park
        return sum(children.results.values())

    job_id = await producer.add("film", attempts=1)
    await worked(bench, handler, ended(bench, job_id))
    stored = bench.hash(job_id)
    assert (stored["returnvalue"], stored["atm"], stored["ats"]) == ("30", "1", "2")
    told = [event["event"] for event in bench.events() if event.get("jobId") == job_id]
    assert told == [
        *("added", "waiting", "active", "waiting-children", "waiting", "active", "completed"),
    ]


@pytest.mark.clause("B-51")
async def test_a_parked_job_whose_children_have_ended_runs_again_at_once(bench: Bench) -> None:
    producer, queue = bench.producer(), bench.queue()
    await producer.add("film")
    (parent,) = await queue.claim(1, wait_ms=0)
    await producer.add_children(parent.job_id, [Flow(name="scene")])
    (child,) = await queue.claim(1, wait_ms=0)
    assert await queue.settle([Outcome(child, "complete")]) == [COMPLETED]
    parked = Outcome(parent, "snooze", until="children")
    assert await queue.settle([parked]) == [RELEASED]
    assert await queue.settle([parked]) == [RELEASED]  # sent again
    (again,) = await queue.claim(1, wait_ms=0)
    assert (again.job_id, again.attempt) == (parent.job_id, 1)


@pytest.mark.clause("B-51", "B-26")
async def test_a_park_that_is_sent_again_gets_the_same_verdict(bench: Bench) -> None:
    producer, queue = bench.producer(), bench.queue()
    await producer.add("film")
    (parent,) = await queue.claim(1, wait_ms=0)
    await producer.add_children(parent.job_id, [Flow(name="scene")])
    parked = Outcome(parent, "snooze", until="children")
    for _ in range(2):
        assert await queue.settle([parked]) == [Retried(0)]
    assert bench.ids("waiting-children") == [parent.job_id]
    assert bench.ids("active") == []


@pytest.mark.clause("B-51", "B-15")
async def test_a_handler_lets_a_rate_limited_queue_rest(bench: Bench) -> None:
    starts: list[float] = []

    @task("work")
    async def handler(job: Job) -> None:
        starts.append(asyncio.get_running_loop().time())
        if len(starts) == 1:
            raise RateLimit(0.4)

    jobs = [await bench.producer().add("work") for _ in range(3)]
    limits = {"limit_max": 1_000, "limit_ms": 1_000}
    await worked(bench, handler, ended(bench, *jobs), **limits)
    # The two that were claimed together ran; nothing else did before the rest was over.
    assert min(starts[2:]) - starts[0] > 0.35
    assert bench.hash(jobs[0])["atm"] == "1"


@pytest.mark.clause("B-51", "B-15")
async def test_without_a_limiter_only_the_job_itself_waits(bench: Bench) -> None:
    producer, queue = bench.producer(), bench.queue()
    await producer.add_bulk([("work", {}, {}), ("work", {}, {})])
    (lease,) = await queue.claim(1, wait_ms=0)
    rest = Outcome(lease, "snooze", delay_ms=60_000, until="rate_limit")
    (verdict,) = await queue.settle([rest])
    assert isinstance(verdict, Retried)
    assert await queue.settle([rest]) == [verdict]
    assert bench.ids("delayed") == [lease.job_id]
    assert not bench.raw.exists(bench.key("limiter"))
    assert len(await queue.claim(5, wait_ms=0)) == 1


@pytest.mark.clause("B-21")
async def test_a_fatal_error_is_bullmqs_unrecoverable_one(bench: Bench) -> None:
    @task("work")
    async def handler(job: Job) -> None:
        raise Fatal("no use")

    job_id = await bench.producer().add("work", attempts=5)
    await worked(bench, handler, ended(bench, job_id))
    stored = bench.hash(job_id)
    assert (stored["failedReason"], stored["atm"]) == ("no use", "1")
    assert "retries-exhausted" not in {event["event"] for event in bench.events()}


@pytest.mark.clause("B-56")
async def test_a_handler_replaces_the_data_of_its_job_for_the_next_attempt(bench: Bench) -> None:
    seen: list[Any] = []

    @task("*")
    async def handler(job: Job) -> None:
        seen.append(job.payload)
        if job.attempt == 1:
            await job.update_data({"step": 2})
            assert job.payload == {"step": 2}
            raise RuntimeError("again")

    @task("threaded")
    def threaded(job: Job) -> None:
        job.update_data({"from": "a thread"})

    producer = bench.producer()
    first = await producer.add("work", {"step": 1}, attempts=2)
    second = await producer.add("threaded", {})
    await worked(bench, [handler, threaded], ended(bench, first, second))
    assert seen == [{"step": 1}, {"step": 2}]
    assert bench.hash(second)["data"] == '{"from":"a thread"}'


@pytest.mark.clause("B-56", "B-18")
async def test_data_of_a_lost_job_is_not_replaced(bench: Bench) -> None:
    queue = bench.queue()
    job_id = await bench.producer().add("work", {"n": 1})
    (lease,) = await queue.claim(1, wait_ms=1_000)
    bench.raw.delete(bench.key(f"{job_id}:lock"))
    (answer,) = await queue.report([Report(lease=lease, payload=b'{"n":2}')])
    assert isinstance(answer, LeaseLost)
    assert bench.hash(job_id)["data"] == '{"n":1}'


@pytest.mark.clause("B-56")
async def test_a_handler_sees_the_options_of_its_job(bench: Bench) -> None:
    seen: dict[str, Any] = {}

    @task("*")
    async def handler(job: Job) -> None:
        seen.update(job.opts)

    job_id = await bench.producer().add("work", attempts=3, backoff=5, keepLogs=2)
    await worked(bench, [handler], ended(bench, job_id))
    assert seen == {"attempts": 3, "backoff": {"type": "fixed", "delay": 5}, "keepLogs": 2}


@pytest.mark.clause("B-56", "B-22")
@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_handler_asks_for_the_results_of_its_children(bench: Bench, kind: str) -> None:
    async def in_the_loop(job: Job) -> Any:
        return (await job.children).results

    def in_a_thread(job: Job) -> Any:
        return job.children.results

    @task("child")
    async def child(job: Job) -> Any:
        return job.payload["n"]

    parent = task("parent")(in_the_loop if kind == "async" else in_a_thread)
    flow = Flow(name="parent", children=[Flow(name="child", data={"n": 7})])
    root = await bench.producer().add_flow(flow)
    await worked(bench, [parent, child], ended(bench, root))
    (result,) = json.loads(bench.hash(root)["returnvalue"]).values()
    assert result == 7


@pytest.mark.clause("B-58")
async def test_a_backoff_of_one_s_own_says_how_long_to_wait(bench: Bench) -> None:
    asked: list[tuple[int, str, str, str]] = []
    starts: list[float] = []

    def slowly(attempts_made: int, kind: str, error: BaseException, job: Job) -> int:
        asked.append((attempts_made, kind, str(error), job.id))
        return 150 if attempts_made == 1 else -1

    @task("work", backoff=slowly)
    async def handler(job: Job) -> None:
        starts.append(asyncio.get_running_loop().time())
        raise RuntimeError(f"broken {job.attempt}")

    job_id = await bench.producer().add("work", attempts=9, backoff={"type": "slowly"})
    await worked(bench, [handler], ended(bench, job_id))
    assert asked == [(1, "slowly", "broken 1", job_id), (2, "slowly", "broken 2", job_id)]
    assert starts[1] - starts[0] >= 0.14
    assert bench.hash(job_id)["failedReason"] == "broken 2"


@pytest.mark.clause("B-58")
async def test_a_backoff_that_nobody_knows_fails_the_job_and_says_so(bench: Bench) -> None:
    @task("work")
    async def handler(job: Job) -> None:
        raise RuntimeError("broken")

    job_id = await bench.producer().add("work", attempts=9, backoff={"type": "slowly"})
    await worked(bench, [handler], ended(bench, job_id))
    reason = bench.hash(job_id)["failedReason"]
    assert reason.startswith("Unknown backoff strategy slowly")
    assert reason.endswith("broken")
    assert bench.hash(job_id)["atm"] == "1"


@pytest.mark.clause("B-25")
async def test_a_worker_keeps_finished_jobs_for_so_long_where_they_say_nothing(
    bench: Bench,
) -> None:
    @task("*")
    async def handler(job: Job) -> None:
        if job.task == "bad":
            raise RuntimeError("bad")

    producer = bench.producer()
    for name in ("good", "bad"):
        for job_id in (f"old-{name}", f"own-{name}"):
            bench.raw.hset(bench.key(job_id), mapping={"name": name, "data": "{}", "opts": "{}"})
        key = bench.key("completed" if name == "good" else "failed")
        bench.raw.zadd(key, {f"old-{name}": 1_000, f"own-{name}": 2_000})
    options = {"keep_completed_s": 60, "keep_failed_s": 60}
    ids = [await producer.add("good"), await producer.add("bad")]
    await worked(bench, [handler], ended(bench, *ids), **options)
    assert bench.ids("completed") == [ids[0]]
    assert bench.ids("failed") == [ids[1]]
    assert bench.hash("old-good") == {}


@pytest.mark.clause("B-56", "B-58")
async def test_a_handler_in_a_process_sees_options_replaces_data_and_backs_off(
    bench: Bench,
) -> None:
    options = {"attempts": 3, "backoff": {"type": "gently"}}
    job_id = await bench.producer().add("process", {"n": 1}, **options)
    await worked(bench, in_a_process, ended(bench, job_id))
    assert json.loads(bench.hash(job_id)["returnvalue"]) == [{"from": "a process"}, 3]


@pytest.mark.clause("B-56")
async def test_a_handler_in_a_process_sees_an_option_beyond_64_bits(bench: Bench) -> None:
    job_id = await bench.producer().add("options", {})
    bench.raw.hset(bench.key(job_id), "opts", f'{{"attempts":1,"far":{10**30}}}')
    await worked(bench, shows_options, ended(bench, job_id))
    assert json.loads(bench.hash(job_id)["returnvalue"]) == str(10**30)
