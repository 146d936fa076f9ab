"""`tenure bench`: how fast this machine is, with every effect of the contract.

The figures that are compared with other systems come from `benchmarks/`; this is the quick look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from tenure.cli.options import json_option
from tenure.cli.output import emit, emit_text, note
from tenure.core.job import NewJob
from tenure.core.registry import open_queue
from tenure.store.embedded import embedded_redis
from tenure.worker import Job, Settings, Task, Worker, task
from tenure.worker.telemetry import configure_logs

_BULK = 500
_PROBES_PER_S = 100


@click.command("bench", short_help="Measure this machine on a private store.")
@click.option("--jobs", type=click.IntRange(100, 5_000_000), default=20_000, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.5, 600), default=3.0, help="For the latency.")
@click.option("--fsync", type=click.Choice(["everysec", "always", "no"]), default="everysec")
@json_option
def command(jobs: int, seconds: float, fsync: str, as_json: bool) -> None:
    """Enqueue jobs in bulk, run them as no-ops, then measure the way from submit to start.

    Gateway and network are not in these figures; worker and client share one process.

    \b
    tenure bench
    tenure bench --json
    """
    import uvloop

    configure_logs(level="error", json=False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(_bench(jobs, seconds, fsync))
    if as_json:
        emit(figures)
    else:
        emit_text(_text(figures))


async def _bench(jobs: int, seconds: float, fsync: str) -> dict[str, Any]:
    note("starting a private store")
    async with embedded_redis(appendfsync=fsync, with_password=True) as server:
        url = f"streams+{server.url}?max_depth=0"
        note(f"enqueue {jobs} jobs, {_BULK} a call")
        enqueue_s = await _enqueue(url, jobs)
        note("run them")
        run_s, cpu_s = await _run_all(url)
        note(f"submit {_PROBES_PER_S} jobs a second for {seconds:g} s")
        waits_ms = await _latency(url, seconds)
    return {
        "jobs": jobs,
        "appendfsync": fsync,
        "enqueue_per_s": round(jobs / enqueue_s),
        "run_per_s": round(jobs / run_s),
        "worker_cpu_us_per_job": round(cpu_s / jobs * 1e6, 1),
        "start_latency_ms": {"p50": quantile(waits_ms, 0.5), "p99": quantile(waits_ms, 0.99)},
        "probes": len(waits_ms),
    }


async def _enqueue(url: str, jobs: int) -> float:
    queue = open_queue(url, worker_id="bench")
    new = [NewJob(task="noop", payload=b"{}") for _ in range(_BULK)]
    with _stopwatch() as elapsed:
        for start in range(0, jobs, _BULK):
            await queue.submit(new[: min(_BULK, jobs - start)])
    await queue.close()
    return elapsed[0]


async def _run_all(url: str) -> tuple[float, float]:
    """Seconds and CPU seconds of this process until the queue is empty."""
    worker = Worker([_noop()], queues=[url], settings=Settings(burst=True, concurrency=_BULK))
    cpu_s = time.process_time()
    with _stopwatch() as elapsed:
        await worker.serve()
    return elapsed[0], time.process_time() - cpu_s


async def _latency(url: str, seconds: float) -> list[float]:
    """Milliseconds from the call of submit to the first line of the handler."""
    asked: dict[str, float] = {}
    waits_ms: list[float] = []
    count = round(seconds * _PROBES_PER_S)
    all_started = asyncio.Event()

    async def started(job: Job) -> None:
        waits_ms.append((time.perf_counter() - asked.pop(job.id)) * 1000)
        if len(waits_ms) == count:
            all_started.set()

    worker = Worker([task("noop")(started)], queues=[url])
    serving = asyncio.create_task(worker.serve())
    queue = open_queue(url, worker_id="bench")
    begin = time.perf_counter()
    for number in range(count):
        await asyncio.sleep(max(0.0, begin + number / _PROBES_PER_S - time.perf_counter()))
        job_id = f"probe-{number}"
        asked[job_id] = time.perf_counter()
        await queue.submit([NewJob(task="noop", payload=b"{}", job_id=job_id)])
    await asyncio.wait_for(all_started.wait(), 30)
    worker.stop()
    await serving
    await queue.close()
    return waits_ms


def _noop() -> Task:
    async def noop(job: Job) -> None:
        return None

    return task("noop")(noop)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, by nearest rank.

    >>> quantile([5.0, 1.0, 3.0], 0.5), quantile([1.0, 2.0], 0.99)
    (3.0, 2.0)
    """
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


@contextmanager
def _stopwatch() -> Iterator[list[float]]:
    elapsed = [0.0]
    begin = time.perf_counter()
    yield elapsed
    elapsed[0] = time.perf_counter() - begin


def _text(figures: dict[str, Any]) -> str:
    latency, cpu_us = figures["start_latency_ms"], figures["worker_cpu_us_per_job"]
    probes = f"{figures['probes']} jobs at {_PROBES_PER_S} a second"
    lines = [
        f"enqueue     {figures['enqueue_per_s']:>9,} jobs/s   (bulk of {_BULK})",
        f"run         {figures['run_per_s']:>9,} jobs/s   ({cpu_us} us of CPU a job)",
        f"start p50   {latency['p50']:>9} ms",
        f"start p99   {latency['p99']:>9} ms       ({probes})",
    ]
    return "\n".join(lines)
