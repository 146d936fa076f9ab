"""How many events a second the audit checks, beside a mere scan of the columns that it needs."""

from __future__ import annotations

import shutil
import tempfile
import time
from functools import cache

from pyspark.sql import functions as F  # noqa: N812

from harness.histories import fill_lake
from harness.scenario import Column, Figures, Goal, Scenario, Stage, ratio
from leasehold.pipeline import SparkSettings, open_session
from leasehold.pipeline.audit.lakes import audit_lake
from leasehold.pipeline.events import lake_events
from leasehold.pipeline.lake.files import LakeFiles
from leasehold.pipeline.tables.update import update_tables

NEEDED = (
    "journal", "pos", "contract", "queue", "job_id", "type", "ts_ms", "ver", "from_state",
    "to_state", "attempt", "fence", "prev_fence", "token_h", "worker_id", "lease_until_ms",
    "prev_lease_until_ms", "priority", "due_ms", "max_attempts",
)  # fmt: skip


@cache
def _lake(events: int) -> tuple[str, int]:
    path = f"{tempfile.mkdtemp(prefix='leasehold-bench-')}/lake"
    return path, fill_lake(path, events)


def measure(stage: Stage, name: str) -> Figures:
    """One pass of one kind over the same lake."""
    spark = open_session(SparkSettings(conf={"spark.sql.shuffle.partitions": "16"}))
    spark.range(1_000).count()
    path, events = _lake(stage.jobs)
    began = time.perf_counter()
    if name == "leasehold":
        result = audit_lake(spark, path, full=True)
        if result.violations or result.events != events or result.looked_at:
            raise RuntimeError(f"the made history is sound, but: {result}")
    elif name == "tables":
        update_tables(spark, path, scratch=True)
    else:
        rows = lake_events(spark, LakeFiles(path))
        rows.select(F.xxhash64(*NEEDED).alias("h")).agg(F.bit_xor("h")).collect()
    took = time.perf_counter() - began
    shutil.rmtree(f"{path}/audit", ignore_errors=True)
    return {"events_per_s": events / took}


SCENARIO = Scenario(
    name="pipeline_audit",
    title="Events audited per second",
    about=(
        "A made lake of sound jobs with four events each. `scan`: Spark reads the columns that the "
        "audit needs and folds them into one number. `leasehold`: the whole audit, from scratch. "
        "`tables`: attempts, jobs, metrics, latencies and slo from scratch."
    ),
    contenders=("scan", "leasehold", "tables"),
    jobs=10_000_000,
    quick_jobs=200_000,
    headline="events_per_s",
    columns=(Column("events_per_s", "events/s", better="high"),),
    measure=measure,
    goals=(
        Goal(
            "the audit reaches 60 % of a mere scan",
            ratio("leasehold", "scan", "events_per_s"),
            least=0.6,
        ),
    ),
)
