"""One OmniQ queue: our worker and the contract's consumer, beside the official Python package."""

from __future__ import annotations

from functools import partial

from harness.quantiles import quantile
from harness.scenario import Column, Figures, Goal, Scenario, Stage, ratio

OURS, OFFICIAL = "tenure_omniq", "omniq_python"
CONSUME = 0  # what our adapter takes for "run the contract's own consume()"
RATE_PER_S = 50
MANY = 100_000


def measure(stage: Stage, name: str) -> Figures:
    jobs = stage.jobs if name == OURS else max(200, stage.jobs // 10)
    figures: dict[str, float | None] = {}
    figures["jobs_per_s"], spent = _drained(stage, name, "noop", jobs)
    figures |= spent
    figures["grouped"], _ = _drained(stage, name, "grouped", jobs)
    figures["publish"] = _published(stage, name, jobs)
    figures["p99_ms"] = _waited(stage, name, min(300, jobs))
    figures["pipelined"] = None
    figures["consume"] = None
    with stage.peer(name) as peer:
        if name == OFFICIAL:
            figures["pipelined"] = peer.ask("pipelined", count=jobs)["jobs_per_s"]
    if name == OURS:
        figures["consume"], _ = _drained(stage, name, "noop", jobs, concurrency=CONSUME)
    with stage.peer(name) as peer:
        many = MANY if stage.jobs >= 10_000 else stage.jobs
        figures["blocked_ms"] = peer.ask("blocked", count=many)["ms"]
    return figures


def _drained(
    stage: Stage, name: str, task: str, jobs: int, *, concurrency: int | None = None
) -> tuple[float, dict[str, float | None]]:
    """Jobs a second from the first handler's start until nothing is unfinished."""
    with stage.peer(name, concurrency=concurrency) as peer:
        mode = "bulk" if "bulk" in peer.prepared.modes else "single"
        peer.ask("enqueue", task=task, count=jobs, mode=mode)
        stage.server.reset_counters()
        peer.probe.unlink(missing_ok=True)
        worker = peer.start_worker(expect=jobs)
        peer.wait_for(peer.probe, worker, within_s=60 + jobs / 20)
        settled_s = peer.until_settled()
        spent, told = stage.server.spent(), peer.told()
        cpu_s = (told["cpu_last_ns"] - told["cpu_first_ns"]) / 1e9
        peer.probe.unlink()
    return jobs / (settled_s - told["first_ns"] / 1e9), {
        "worker_cpu_us": cpu_s / jobs * 1e6,
        "redis_cpu_us": spent.cpu_s / jobs * 1e6,
    }


def _published(stage: Stage, name: str, jobs: int) -> float:
    with stage.peer(name) as peer:
        mode = "bulk" if "bulk" in peer.prepared.modes else "single"
        return jobs / float(peer.ask("enqueue", task="noop", count=jobs, mode=mode)["seconds"])


def _waited(stage: Stage, name: str, jobs: int) -> float:
    """p99 of the time from the publish call to the handler, of an idle worker."""
    with stage.peer(name) as peer:
        worker = peer.start_worker(expect=jobs)
        peer.ask("enqueue", task="stamp", count=1, mode="single")
        peer.wait_for(peer.probe.with_suffix(".ready"), worker, within_s=60)
        peer.until_settled()
        peer.ask("pace", rate=RATE_PER_S, seconds=jobs / RATE_PER_S)
        peer.wait_for(peer.probe, worker, within_s=60)
        waits_ms = [wait_ns / 1e6 for wait_ns in peer.told()["waits_ns"]]
        peer.probe.unlink()
        peer.probe.with_suffix(".ready").unlink()
    return quantile(waits_ms, 0.99)


_over = partial(ratio, OURS, OFFICIAL)

SCENARIO = Scenario(
    name="omniq",
    title="An OmniQ queue, one worker process",
    about=(
        "The queue is filled; then one worker process runs no-op jobs, without groups and with a "
        "thousand groups of limit 1. The clock runs from the start of the first handler until the "
        "store holds nothing unfinished. `pipelined` is what the official scripts allow: reserve "
        "and ack of a hundred jobs in flight, without any consumer around them. `publish` is each "
        "one's fastest way in. `blocked` is the longest script while a hundred jobs are removed "
        f"from (ours: and sent back to) a queue of {MANY:,}. Both write OmniQ's data; ours also "
        "writes its journal."
    ),
    contenders=(OURS, OFFICIAL),
    jobs=20_000,
    quick_jobs=1_000,
    headline="jobs_per_s",
    columns=(
        Column("jobs_per_s", "jobs/s", better="high"),
        Column("grouped", "jobs/s, 1000 groups", better="high"),
        Column("consume", "consume() jobs/s", better="high"),
        Column("pipelined", "scripts alone, jobs/s", better="high"),
        Column("publish", "published/s", better="high"),
        Column("p99_ms", "publish to start, p99 ms", 2, "low"),
        Column("blocked_ms", "blocked ms", 2, "low"),
        Column("worker_cpu_us", "worker CPU us/job", 1, "low"),
        Column("redis_cpu_us", "Redis CPU us/job", 1, "low"),
    ),
    measure=measure,
    goals=(
        Goal("at least 15 times the official consumer", _over("jobs_per_s"), least=15),
        Goal("consume() at least 15 times it", _over("consume", "jobs_per_s"), least=15),
        Goal("at least 1.5 times its scripts alone", _over("jobs_per_s", "pipelined"), least=1.5),
        Goal("publish at least 3 times", _over("publish"), least=3),
        Goal("p99 from publish to start, ms", lambda median: median(OURS, "p99_ms"), most=10),
        Goal(
            "grouped at least 0.7 of ungrouped",
            ratio(OURS, OURS, "grouped", "jobs_per_s"),
            least=0.7,
        ),
        Goal("remove and retry block, ms", lambda median: median(OURS, "blocked_ms"), most=5),
    ),
)
