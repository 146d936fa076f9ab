"""How many events a second the audit checks, beside a mere scan of the columns that it needs."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache

import pyarrow.parquet as pq
from pyspark.sql import functions as F  # noqa: N812

from harness import environments
from harness.adapter import PeerError
from harness.histories import fill_lake
from harness.scenario import Column, Figures, Goal, Scenario, Stage, ratio
from tenure.pipeline import SparkSettings, open_session
from tenure.pipeline.audit.lakes import audit_lake
from tenure.pipeline.audit.rules import known_steps
from tenure.pipeline.audit.run import NEEDED
from tenure.pipeline.lake import Lake, lake_events
from tenure.pipeline.tables.update import update_tables


@cache
def _lake(events: int) -> tuple[str, int]:
    """Made once for all contenders."""
    path = f"{tempfile.mkdtemp(prefix='tenure-bench-')}/lake"
    return path, fill_lake(path, events)


OTHERS = ("duckdb", "polars")
AGAIN = "1 % more"
DAYS, DAY_MS = 100, 86_400_000
SIZES = (1_000_000, 10_000_000, 50_000_000)


def measure(stage: Stage, name: str) -> Figures:
    """One pass of one kind over lakes of every size up to the one that is asked for."""
    if name == AGAIN:
        return _again(stage.jobs)
    sizes = sorted({*(size for size in SIZES if size < stage.jobs), stage.jobs})
    # `tables` is beside the point here: only at the size that is asked for.
    took = {size: _took_s(name, size) for size in (sizes[-1:] if name == "tables" else sizes)}
    rates: dict[str, float | None] = {
        _key(size): size / took[size] if size in took else None for size in SIZES
    }
    grown = took[SIZES[2]] / took[SIZES[1]] if {*SIZES[1:]} <= took.keys() else None
    return {"events_per_s": stage.jobs / took[stage.jobs], **rates, "growth": grown}


def _took_s(name: str, size: int) -> float:
    path, events = _lake(size)
    if name in OTHERS:
        return _elsewhere(name, path, events)
    spark = open_session(SparkSettings())
    spark.range(1_000).count()
    began = time.perf_counter()
    if name == "tenure":
        result = audit_lake(spark, path, full=True)
        if result.violations or result.events != events or result.looked_at:
            raise PeerError(f"the made history is sound, but: {result}")
    elif name == "tables":
        update_tables(spark, path, scratch=True)
    else:
        rows = lake_events(spark, Lake(path))
        rows.select(F.xxhash64(*NEEDED).alias("h")).agg(F.bit_xor("h")).collect()
    took_s = time.perf_counter() - began
    for table in ("audit_runs", "audit_open", "violations"):
        shutil.rmtree(f"{path}/{table}", ignore_errors=True)
    return took_s


def _again(events: int) -> Figures:
    """What audit and tables cost after a hundredth of new events, as shares of the full cost."""
    folder = tempfile.mkdtemp(prefix="tenure-bench-")
    path, spark = f"{folder}/lake", open_session(SparkSettings())
    step_ms = max(1, DAYS * DAY_MS * 80 // events)
    new = events // DAYS
    try:
        fill_lake(path, events, step_ms=step_ms)
        update_tables(spark, path, scratch=True)  # warm
        full = _timed(lambda: audit_lake(spark, path, full=True))
        made = _timed(lambda: update_tables(spark, path, scratch=True))
        fill_lake(path, new, had=events, step_ms=step_ms)
        some = _timed(lambda: audit_lake(spark, path))
        added = _timed(lambda: update_tables(spark, path))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "events_per_s": new / (some + added),
        "audit_share": some / full,
        "tables_share": added / made,
    }


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _key(size: int) -> str:
    return f"e{size}"


def _elsewhere(name: str, path: str, events: int) -> float:
    """The proof by another engine, in an environment and a process of its own."""
    steps = f"{path}/steps.parquet"
    pq.write_table(known_steps(), steps)
    script = environments.PEERS / name / "audit.py"
    python = environments.binaries(name) / "python"
    done = subprocess.run(
        [python, script, f"{path}/events/*/*.parquet", steps], capture_output=True, text=True
    )
    if done.returncode:
        raise PeerError(f"{name}: {done.stderr.strip()}")
    told = json.loads(done.stdout)
    if (told["events"], told["unproven"]) != (events, 0):
        raise PeerError(f"the made history is sound, but {name} says: {told}")
    return float(told["took_s"])


SCENARIO = Scenario(
    name="pipeline_audit",
    title="Events audited per second",
    about=(
        "A made lake of sound jobs with four events each. `scan`: Spark reads exactly the columns "
        "that the audit reads and folds them into one number. `tenure`: the whole audit, from "
        "scratch, to its summary and carried rows. "
        "`tables`: attempts, jobs, metrics, latencies and slo from scratch. `1 % more`: audit and "
        "tables again after the 101st day of a history of 100 days. `duckdb`, `polars`: "
        "the same proof in SQL and in expressions over the same files, without the lines, "
        "summary and carried rows, and without the start of their process. The driver has 2 GB."
    ),
    contenders=("scan", "tenure", "tables", AGAIN, *OTHERS),
    jobs=10_000_000,
    quick_jobs=200_000,
    headline="events_per_s",
    columns=(
        Column("events_per_s", "events/s", better="high"),
        *(Column(_key(size), f"at {size // 1_000_000}M", better="high") for size in SIZES),
        Column("growth", "time of 50M over 10M", 2, "low"),
        Column("audit_share", "audit again / full", 3, "low"),
        Column("tables_share", "tables again / full", 3, "low"),
    ),
    measure=measure,
    goals=(
        Goal(
            "the audit reaches half of a mere scan",
            ratio("tenure", "scan", "events_per_s"),
            least=0.5,
        ),
        *(
            Goal(
                f"{what} after 1 % new events cost at most 5 % of a full run",
                lambda median, key=key: median(AGAIN, key),
                most=0.05,
            )
            for what, key in (("audits", "audit_share"), ("tables", "tables_share"))
        ),
        Goal(
            "50 million events take at most 5.5 times as long as 10 million",
            lambda median: median("tenure", "growth"),
            most=5.5,
        ),
    ),
)
