"""How many rows a second become jobs, each with an id of its own."""

from __future__ import annotations

import time
from functools import partial

from harness.postgres import shared_postgres
from harness.scenario import Column, Figures, Goal, Median, Scenario, Stage
from harness.sql_histories import made_ledger
from tenure.pipeline import SparkSettings, open_session
from tenure.pipeline.enqueue import enqueue, jobs_of

WARM_UP = 4_000
TASKS = 4
# What is asked of each, in jobs a second.
LEAST = {"streams": 20_000, "bullmq": 20_000, "omniq": 20_000, "postgres": 50_000}


def measure(stage: Stage, name: str) -> Figures:
    """Put rows into an empty queue, then the same rows again."""
    spark = open_session(SparkSettings(quick=True))  # as `tenure pipeline enqueue` opens it
    rows = spark.range(stage.jobs).selectExpr("id", "concat('clip ', id) as title")
    jobs = jobs_of(rows, task="noop", run="bench", key=["id"])
    enqueue(jobs.limit(WARM_UP), _empty(stage, name), tasks=TASKS)
    url = _empty(stage, name)
    figures: dict[str, float | None] = {}
    for column in ("created", "replayed"):
        began = time.perf_counter()
        tally = enqueue(jobs, url, tasks=TASKS)
        figures[f"{column}_per_s"] = stage.jobs / (time.perf_counter() - began)
        if getattr(tally, column) != stage.jobs:
            raise RuntimeError(f"{name}: {tally}")
    return figures


def _empty(stage: Stage, name: str) -> str:
    """The URL of a queue with nothing in it."""
    if name == "postgres":
        return made_ledger(shared_postgres().fresh())
    stage.server.fresh()
    server = stage.server.url
    urls = {
        "streams": f"streams+{server}?max_depth=0",
        "bullmq": f"bullmq+{server}?queue=bench",
        "omniq": f"omniq+{server}?queue=bench",
    }
    return urls[name]


def _created(name: str, median: Median) -> float | None:
    return median(name, "created_per_s")


SCENARIO = Scenario(
    name="pipeline_enqueue",
    title="Rows enqueued per second by Spark",
    about=(
        "Rows with two columns become jobs with every effect of the contract, by four tasks on "
        "local[*]. `again`: the same rows a second time, which adds nothing. `postgres` is an "
        "inbox."
    ),
    contenders=tuple(LEAST),
    jobs=200_000,
    quick_jobs=5_000,
    headline="created_per_s",
    columns=(
        Column("created_per_s", "jobs/s", better="high"),
        Column("replayed_per_s", "again/s", better="high"),
    ),
    measure=measure,
    goals=tuple(
        Goal(f"{least:,} a second into {name}", partial(_created, name), least=least)
        for name, least in LEAST.items()
    ),
)
