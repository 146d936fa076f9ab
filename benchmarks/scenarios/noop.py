"""How many no-op jobs a second one worker process completes."""

from __future__ import annotations

from harness.drain import drain
from harness.scenario import QUEUES, Column, Figures, Goal, Scenario, Stage, ratio

# The fastest would be done before anything can be measured with as few jobs as the slowest do in a
# minute. Who gets fewer does no fewer of them a second.
FEWER = {
    "dramatiq": 2,
    "huey": 2,
    "taskiq": 2,
    "arq": 8,
    "celery": 8,
    "saq": 8,
    "streaq": 8,
    "rq": 20,
}


def measure(stage: Stage, name: str) -> Figures:
    done = drain(stage.part(FEWER.get(name, 1)), name)
    return {
        "jobs": done.jobs,
        "jobs_per_s": done.jobs / done.seconds,
        "worker_cpu_us": done.worker_cpu_s / done.jobs * 1e6,
        "redis_cpu_us": done.redis_cpu_s / done.jobs * 1e6,
        "commands": done.commands / done.jobs,
        "scripts": done.scripts / done.jobs,
        "rss_mb": done.rss_all_mb,
    }


SCENARIO = Scenario(
    name="noop",
    title="No-op jobs per second, one worker process",
    about=(
        "Jobs are enqueued first; then one worker process with the peer's best setting runs them. "
        "The clock runs from the start of the first handler until the store holds nothing "
        "unfinished. `bare_pipelines` drives our scripts from a pipelining client without any "
        "worker around it: the limit. Commands include those that scripts call. Peers run a part "
        "of the jobs, the slower the fewer, so that a round ends."
    ),
    contenders=("tenure", "bare_pipelines", *QUEUES[1:]),
    jobs=40_000,
    quick_jobs=1_000,
    headline="jobs_per_s",
    columns=(
        Column("jobs_per_s", "jobs/s", better="high"),
        Column("jobs", "jobs"),
        Column("worker_cpu_us", "worker CPU us/job", 1, "low"),
        Column("redis_cpu_us", "Redis CPU us/job", 1, "low"),
        Column("commands", "commands/job", 2, "low"),
        Column("scripts", "scripts/job", 3),
        Column("rss_mb", "worker RSS MB", 1, "low"),
    ),
    measure=measure,
    goals=(
        Goal(
            "tenure reaches at least 15 times the fastest peer",
            ratio("tenure", "best peer", "jobs_per_s"),
            least=15,
        ),
        Goal(
            "tenure reaches at least 0.5 of the bare pipelines",
            ratio("tenure", "bare_pipelines", "jobs_per_s"),
            least=0.5,
        ),
    ),
)
