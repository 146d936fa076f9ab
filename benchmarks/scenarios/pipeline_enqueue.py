"""How many rows a second become jobs, each with an id of its own."""

from __future__ import annotations

import time

from harness.scenario import Column, Figures, Goal, Scenario, Stage
from leasehold.pipeline import SparkSettings, open_session
from leasehold.pipeline.enqueue import enqueue, jobs_of

URLS = {
    "streams": "streams+{server}?max_depth=0",
    "bullmq": "bullmq+{server}?queue=bench",
}


def measure(stage: Stage, name: str) -> Figures:
    """Put rows into an empty queue, then the same rows again."""
    spark = open_session(SparkSettings())
    stage.server.fresh()
    url = URLS[name].format(server=stage.server.url)
    rows = spark.range(stage.jobs).selectExpr("id", "concat('clip ', id) as title")
    jobs = jobs_of(rows, task="noop", run="bench", key=["id"])
    enqueue(jobs.limit(2_000), url, tasks=2)
    stage.server.fresh()
    figures: dict[str, float | None] = {}
    for column in ("created", "replayed"):
        began = time.perf_counter()
        tally = enqueue(jobs, url, tasks=4)
        figures[f"{column}_per_s"] = stage.jobs / (time.perf_counter() - began)
        if getattr(tally, column) != stage.jobs:
            raise RuntimeError(f"{name}: {tally}")
    return figures


SCENARIO = Scenario(
    name="pipeline_enqueue",
    title="Rows enqueued per second by Spark",
    about=(
        "Rows with two columns become jobs with every effect of the contract, by four tasks on "
        "local[*]. `again`: the same rows a second time, which adds nothing."
    ),
    contenders=tuple(URLS),
    jobs=200_000,
    quick_jobs=5_000,
    headline="created_per_s",
    columns=(
        Column("created_per_s", "jobs/s", better="high"),
        Column("replayed_per_s", "again/s", better="high"),
    ),
    measure=measure,
    goals=(
        Goal(
            "20,000 a second into streams",
            lambda median: median("streams", "created_per_s"),
            least=20_000,
        ),
        Goal(
            "20,000 a second into bullmq",
            lambda median: median("bullmq", "created_per_s"),
            least=20_000,
        ),
    ),
)
