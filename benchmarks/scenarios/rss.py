"""How much memory one worker process holds after many jobs."""

from __future__ import annotations

from harness.drain import drain
from harness.scenario import QUEUES, Column, Figures, Goal, Scenario, Stage


def measure(stage: Stage, name: str) -> Figures:
    done = drain(stage, name)
    return {"rss_mb": done.rss_mb, "rss_all_mb": done.rss_all_mb}


SCENARIO = Scenario(
    name="rss",
    title="Resident memory of one worker after its jobs",
    about=(
        "The resident memory of the process that ran the handlers, and of the worker with all its "
        "helper processes, right after the last no-op job was settled."
    ),
    contenders=QUEUES,
    jobs=20_000,
    quick_jobs=1_000,
    headline="rss_all_mb",
    columns=(
        Column("rss_mb", "handler process MB", 1, "low"),
        Column("rss_all_mb", "all processes MB", 1, "low"),
    ),
    measure=measure,
    goals=(
        Goal(
            "the worker of tenure stays under 80 MB",
            lambda median: median("tenure", "rss_all_mb"),
            most=80,
        ),
    ),
)
