"""One BullMQ queue, three workers: ours, Node's own, and the Python package's."""

from __future__ import annotations

from harness.scenario import Column, Figures, Goal, Scenario, Stage, ratio

CONCURRENCIES = (1, 10, 50, 100)
OURS, NODE, PYTHON = "tenure_bullmq", "bullmq_node", "bullmq_python"


def measure(stage: Stage, name: str) -> Figures:
    figures: dict[str, float | None] = {}
    for concurrency in CONCURRENCIES:
        # One at a time is slow for everybody: fewer jobs tell as much.
        jobs = max(200, stage.jobs // (4 if concurrency == 1 or name == PYTHON else 1))
        with stage.peer(name, concurrency=concurrency) as peer:
            added = peer.ask("enqueue", task="noop", count=jobs, mode="bulk")
            stage.server.reset_counters()
            worker = peer.start_worker(expect=jobs)
            peer.wait_for(peer.probe, worker, within_s=60 + jobs / 20)
            settled_s = peer.until_settled()
            spent, told = stage.server.spent(), peer.told()
        figures[f"c{concurrency}"] = jobs / (settled_s - told["first_ns"] / 1e9)
        if concurrency == CONCURRENCIES[-1]:
            worker_cpu_s = (told["cpu_last_ns"] - told["cpu_first_ns"]) / 1e9
            figures["worker_cpu_us"] = worker_cpu_s / jobs * 1e6
            figures["redis_cpu_us"] = spent.cpu_s / jobs * 1e6
            figures["commands"] = spent.commands / jobs
            figures["bulk"] = jobs / added["seconds"]
    return figures


SCENARIO = Scenario(
    name="bullmq",
    title="No-op jobs per second on a BullMQ queue, one worker process",
    about=(
        "The queue is filled with bulk adds; then one worker process runs the jobs, at four "
        "concurrencies. The clock runs from the start of the first handler until the store holds "
        "nothing unfinished. All three write BullMQ's data, so any of them could take over from "
        "any other at any time; ours also writes its journal."
    ),
    contenders=(OURS, NODE, PYTHON),
    jobs=10_000,
    quick_jobs=1_000,
    headline="c100",
    columns=(
        *(Column(f"c{n}", f"jobs/s at {n}", better="high") for n in CONCURRENCIES),
        Column("bulk", "bulk adds/s", better="high"),
        Column("worker_cpu_us", "worker CPU us/job", 1, "low"),
        Column("redis_cpu_us", "Redis CPU us/job", 1, "low"),
        Column("commands", "commands/job", 2, "low"),
    ),
    measure=measure,
    goals=(
        Goal("at 100 at least 3 times Node's BullMQ", ratio(OURS, NODE, "c100"), least=3),
        Goal("at 1 not slower than Node's BullMQ", ratio(OURS, NODE, "c1"), least=1),
        Goal("at 100 at least 15 times the Python package", ratio(OURS, PYTHON, "c100"), least=15),
        Goal("bulk adds at least 2 times Node's addBulk", ratio(OURS, NODE, "bulk"), least=2),
    ),
)
