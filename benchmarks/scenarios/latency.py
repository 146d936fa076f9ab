"""How long a job waits between the submit call and its handler, at a modest steady rate."""

from __future__ import annotations

from harness.quantiles import quantile
from harness.scenario import QUEUES, Column, Figures, Goal, Scenario, Stage, ratio

RATE_PER_S = 100


def measure(stage: Stage, name: str) -> Figures:
    """`stage.jobs` jobs at 100 a second, to an idle worker that has already run one."""
    with stage.peer(name) as peer:
        worker = peer.start_worker(expect=stage.jobs)
        # Jobs stamped 0 only wake it up: a cold import or a first connection is not latency.
        peer.ask("enqueue", task="stamp", count=1, mode="single")
        peer.wait_for(peer.probe.with_suffix(".ready"), worker, within_s=60)
        peer.until_settled()
        stage.server.reset_counters()
        peer.ask("pace", rate=RATE_PER_S, seconds=stage.jobs / RATE_PER_S)
        peer.wait_for(peer.probe, worker, within_s=60)
        told = peer.told()
        waits_ms = [wait_ns / 1e6 for wait_ns in told["waits_ns"]]
        return {
            "p50_ms": quantile(waits_ms, 0.50),
            "p90_ms": quantile(waits_ms, 0.90),
            "p99_ms": quantile(waits_ms, 0.99),
            "max_ms": max(waits_ms),
            "worker_cpu_us": (told["cpu_last_ns"] - told["cpu_first_ns"]) / 1e3 / stage.jobs,
            "redis_cpu_us": stage.server.spent().cpu_s / stage.jobs * 1e6,
        }


SCENARIO = Scenario(
    name="latency",
    title="Submit to start, at 100 jobs a second",
    about=(
        "One producer, one idle worker process. The clock starts before the library's submit call "
        "and stops on the first line of the handler; open loop, one job every 10 ms. CPU per job "
        "includes what an idle worker spends on waiting."
    ),
    contenders=QUEUES,
    jobs=1_500,
    quick_jobs=200,
    headline="p99_ms",
    columns=(
        Column("p50_ms", "p50 ms", 2, "low"),
        Column("p90_ms", "p90 ms", 2, "low"),
        Column("p99_ms", "p99 ms", 2, "low"),
        Column("max_ms", "max ms", 1, "low"),
        Column("worker_cpu_us", "worker CPU us/job", 0, "low"),
        Column("redis_cpu_us", "Redis CPU us/job", 0, "low"),
    ),
    measure=measure,
    goals=(
        Goal(
            "the p50 of tenure is not above the best peer's (ratio)",
            ratio("tenure", "best peer", "p50_ms"),
            most=1,
        ),
        Goal(
            "the p99 of tenure is not above the best peer's (ratio)",
            ratio("tenure", "best peer", "p99_ms"),
            most=1,
        ),
    ),
)
