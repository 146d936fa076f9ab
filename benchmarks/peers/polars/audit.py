"""The proof of the audit in Polars: `python audit.py EVENTS STEPS`; answers one line of JSON.

The aggregates of tenure.pipeline.audit.proof over the same files, in a wider row, and no
carried rows, no places in line, no evidence.
"""

from __future__ import annotations

import json
import sys
import time

import polars as pl

KEYS = ["line_h", "job_h", "job_h2"]


def has(bit: int) -> pl.Expr:
    """Whether a step is such a one."""
    return (pl.col("bits").fill_null(0) & bit) != 0


def marked(events: str, steps: str) -> pl.LazyFrame:
    """What each event says, by itself."""
    col, kind = pl.col, pl.col("type")
    known = (
        pl.scan_parquet(events)
        .join(pl.scan_parquet(steps), on=["contract", "type", "from_state", "to_state"], how="left")
        .with_columns(who=pl.struct("worker_id", "token_h").hash(), bits=col("bits"))
    )
    claims = (kind == "claim").cast(pl.Int32)
    before = col("attempt") - claims + kind.is_in(["release", "snooze"]).cast(pl.Int32)
    left = pl.struct(
        ver=col("ver"), state=col("becomes"), fence=col("fence"), lease=col("lease_until_ms"),
        attempt=pl.when(has(8)).then(-1).otherwise(col("attempt")),
        who=pl.when(has(2)).then(col("who")).otherwise(0),
    ).hash()  # fmt: skip
    saw = pl.struct(
        ver=col("ver") - 1, state=col("was"), fence=col("prev_fence"),
        lease=col("prev_lease_until_ms"),
        attempt=pl.when(has(4)).then(-1).otherwise(before),
        who=pl.when(has(1)).then(col("who")).otherwise(0),
    ).hash()  # fmt: skip
    bad = (
        col("bits").is_null()
        | (((col("lease_until_ms") > 0) != has(2)) & (kind != "remove"))
        | (col("fence") != col("prev_fence") + claims)
        | ((kind == "reap") & (col("ts_ms") < col("prev_lease_until_ms")))
        | ((kind == "extend") & (col("lease_until_ms") < col("prev_lease_until_ms")))
        | ((col("max_attempts") > 0) & (col("attempt") > col("max_attempts")))
    )
    timed = col("contract").is_in(["streams", "bullmq", "omniq"]) & (kind != "submit")
    nothing = pl.lit(0, dtype=pl.UInt64)
    return known.select(
        pl.struct("journal", "contract", "queue").hash().alias("line_h"),
        col("job_id").hash(1).alias("job_h"),
        col("job_id").hash(2).alias("job_h2"),
        "ver", "pos", "priority",
        left.alias("left"),
        pl.when((col("ver") == 1) & (kind == "submit")).then(nothing).otherwise(saw).alias("saw"),
        bad.alias("bad"),
        (timed & (col("pos") // 2**22 - col("ts_ms") > 1_000)).alias("late"),
        pl.when((kind == "submit") & (col("due_ms") == 0)).then(col("pos")).alias("submit_at"),
        pl.when(kind == "claim").then(col("pos")).alias("claim_at"),
        (kind == "expire").alias("expires"),
        col("kind").fill_null(0),
    )  # fmt: skip


def proof(events: pl.LazyFrame) -> pl.LazyFrame:
    """One row a job, and of these only how many are not proven."""
    col = pl.col
    jobs = events.group_by(KEYS).agg(
        n=pl.len(), min_ver=col("ver").min(), max_ver=col("ver").max(),
        x=(col("left") ^ col("saw")).bitwise_xor(),
        last=col("left").max_by("ver"), first=col("saw").min_by("ver"),
        bad=col("bad").any(), late=col("late").any(), kind=col("kind").max_by("ver"),
        expired=col("expires").any(), last_pos=col("pos").max_by("ver"), max_pos=col("pos").max(),
        submit_pos=col("submit_at").min(), claim_pos=col("claim_at").min(),
        priority=col("priority").max(),
    )  # fmt: skip
    is_open = (
        col("bad")
        | col("late")
        | (col("n") != col("max_ver") - col("min_ver") + 1)
        | (col("x") != col("last") ^ col("first"))
        | (col("last_pos") != col("max_pos"))
        | (col("min_ver") > 1)
    )
    return jobs.select(
        jobs=pl.len(), events=col("n").sum(), unproven=is_open.sum(), last=col("submit_pos").max(),
        claim=col("claim_pos").max(), priority=col("priority").max(), kind=col("kind").max(),
        expired=col("expired").any(),
    )  # fmt: skip


def main(events: str, steps: str) -> None:
    """Prove once and say how long it took."""
    began = time.perf_counter()
    row = proof(marked(events, steps)).collect(engine="streaming").row(0, named=True)
    told = {name: row[name] for name in ("jobs", "events", "unproven")}
    print(json.dumps({"took_s": time.perf_counter() - began} | told))


if __name__ == "__main__":
    main(*sys.argv[1:])
