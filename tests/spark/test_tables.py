"""Tables: each transform on a few rows, and bit by bit the same as all at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.testing import assertDataFrameEqual

from tenure.core.errors import NotFound
from tenure.core.journal import JournalEvent
from tenure.pipeline import prepare
from tenure.pipeline.audit.lakes import audit_lake, violations
from tenure.pipeline.capture import capture
from tenure.pipeline.lake import Lake, with_kinds
from tenure.pipeline.schema import OFFSET, rows_of
from tenure.pipeline.tables.update import merge, selected, table_files, update_tables
from tests.chaos.sim.test_verdict import sound
from tests.spark.working import trim, work

DAY_MS = 86_400_000
MONDAY_MS = 20_773 * DAY_MS


def event(at_ms: int, kind: str, ver: int, here: str, there: str, **more: object) -> JournalEvent:
    return msgspec.convert(
        {
            "seq": str(at_ms + 1), "contract": "memory", "queue": "q", "job_id": "a", "task": "t",
            "type": kind, "ts_ms": MONDAY_MS + at_ms, "ver": ver, "from_state": here,
            "to_state": there,
        }
        | more,
        JournalEvent,
    )  # fmt: skip


# Submitted at 0, due at 100, claimed at 150; fails at 250, due again at 1250; claimed at 1300,
# lost at 2300; claimed at 2400 and done at 2500.
HISTORY = [
    event(0, "submit", 1, "", "waiting", due_ms=MONDAY_MS + 100),
    event(150, "claim", 2, "waiting", "running", fence=1, attempt=1, worker_id="w1"),
    event(250, "retry", 3, "running", "waiting", fence=1, attempt=1, worker_id="w1",
          due_ms=MONDAY_MS + 1250, error_code="503"),
    event(1300, "claim", 4, "waiting", "running", fence=2, attempt=2, worker_id="w2"),
    event(1400, "extend", 5, "running", "running", fence=2, attempt=2, worker_id="w2"),
    event(2300, "reap", 6, "running", "waiting", fence=2, attempt=2, worker_id="w2"),
    event(2400, "claim", 7, "waiting", "running", fence=3, attempt=3, worker_id="w1"),
    event(2500, "complete", 8, "running", "done", fence=3, attempt=3, worker_id="w1"),
]  # fmt: skip


def frame(spark: SparkSession, events: Sequence[JournalEvent]) -> DataFrame:
    return spark.createDataFrame(pa.Table.from_batches([rows_of(events, "j")]))


def made(spark: SparkSession, name: str, events: Sequence[JournalEvent]) -> DataFrame:
    """A table of these events, by its file and those of the tables it is made of."""
    rows = frame(spark, events)
    with_kinds(rows).createOrReplaceTempView("new_events")
    rows.createOrReplaceTempView("events")
    files = {file.name: file for file in table_files()}
    for each in ("attempts", "jobs"):
        selected(spark, files[each]).createOrReplaceTempView(each)
    return spark.table(name) if name in ("attempts", "jobs") else selected(spark, files[name])


def test_an_attempt_knows_its_wait_its_run_and_its_end(spark: SparkSession) -> None:
    rows = made(spark, "attempts", HISTORY)
    wanted = spark.createDataFrame(
        [
            (1, 1, "w1", 50, 100, 1000, "retry", "503", 0, "2026-11-16"),
            (2, 2, "w2", 50, 1000, 0, "reap", "", 1, "2026-11-16"),
            (3, 3, "w1", 100, 100, None, "complete", "", 0, "2026-11-16"),
        ],
        "fence bigint, attempt int, worker_id string, wait_ms bigint, run_ms bigint, "
        "backoff_ms bigint, outcome string, error_code string, extends bigint, day string",
    )
    assertDataFrameEqual(rows.select(*wanted.columns), wanted)


def test_a_job_knows_its_state_its_starts_and_its_times(spark: SparkSession) -> None:
    rows = made(spark, "jobs", HISTORY)
    wanted = spark.createDataFrame(
        [("done", True, 3, 1, 1, 1, 50, 2500, "2026-11-16")],
        "state string, is_final boolean, starts bigint, retries bigint, lost bigint, "
        "epochs bigint, wait_ms bigint, total_ms bigint, day string",
    )
    assertDataFrameEqual(rows.select(*wanted.columns), wanted)
    unfinished = made(spark, "jobs", HISTORY[:-1]).collect()[0]
    assert (unfinished.state, unfinished.day, unfinished.total_ms) == ("running", "open", None)


def test_an_hour_knows_how_many_how_fast_and_how_often_it_failed(spark: SparkSession) -> None:
    rows = {row.worker_id: row for row in made(spark, "metrics_hourly", HISTORY).collect()}
    assert (rows["w1"].attempts, rows["w1"].completed, rows["w1"].retried) == (2, 1, 1)
    assert (rows["w1"].p50_wait_ms, rows["w1"].p50_run_ms, rows["w1"].retry_rate) == (75, 100, 0.5)
    assert (rows["w1"].jobs, rows["w1"].p99_total_ms, rows["w1"].dead) == (1, 2500, 0)
    assert (rows["w2"].lost, rows["w2"].lost_rate) == (1, 1.0)
    assert (rows[""].submitted, rows[""].attempts) == (1, 0)
    found = made(spark, "latency_hourly", HISTORY).collect()
    latencies = {(row.kind, row.bucket): row["count"] for row in found}
    assert latencies == {
        ("wait", 5): 2, ("wait", 6): 1, ("run", 6): 2, ("run", 9): 1, ("total", 11): 1,
    }  # fmt: skip


def test_a_failed_attempt_of_the_sql_contracts_counts_as_buried_or_cancelled(
    spark: SparkSession,
) -> None:
    history = []
    for number, (code, end) in enumerate([("boom", "bury"), ("cancelled", "cancel"), ("", "bury")]):
        job: dict[str, object] = {"contract": "inbox", "job_id": f"j{number}"}
        held = job | {"fence": 1, "attempt": 1, "worker_id": "w1"}
        history += [
            event(0, "submit", 1, "", "queued", **job),
            event(10, "claim", 2, "queued", "claimed", **held),
            event(20, "fail", 3, "claimed", "failed", **held, error_code=code),
            event(30, end, 4, "failed", "dead_letter", **held, error_code=code),
        ]
    rows = {row.worker_id: row for row in made(spark, "metrics_hourly", history).collect()}
    assert (rows["w1"].attempts, rows["w1"].buried, rows["w1"].cancelled) == (3, 2, 1)
    assert (rows["w1"].jobs, rows["w1"].dead) == (3, 2)


@pytest.mark.parametrize(("target_ms", "within"), [(2_500, 1), (2_499, 0)])
def test_a_target_is_met_up_to_its_last_millisecond(
    spark: SparkSession, target_ms: int, within: int
) -> None:
    targets = [{"queue": "q", "target_ms": target_ms}, {"queue": "", "target_ms": 1}]
    spark.createDataFrame(targets).createOrReplaceTempView("targets")
    (row,) = made(spark, "slo", HISTORY).collect()
    assert (row.finished, row.within, row.share) == (1, within, float(within))


def put(lake: str, events: Sequence[JournalEvent], after: int) -> None:
    """A batch of events as capture would leave it."""
    place = Lake(lake)
    place.begin()
    told = {"after": after, "upto": int(events[-1].seq), "units": len(events)}
    offset = JournalEvent(
        seq=events[-1].seq, contract="", queue="", job_id="", type=OFFSET, ts_ms=0,
        data=msgspec.json.encode(told).decode(),
    )  # fmt: skip
    place.events.put_events([rows_of([*events, offset], "j")])


def spread(seed: int) -> list[JournalEvent]:
    """A simulated history over three days, with jobs that somebody sends back after their end."""
    rng = Random(seed)
    events = [e for e in sound(seed).events if e.ver]
    for job_id in sorted({e.job_id for e in events}):
        last = [e for e in events if e.job_id == job_id][-1]
        if last.to_state in ("done", "failed") and rng.random() < 0.3:
            events.append(
                msgspec.structs.replace(
                    last, type="reopen", ver=last.ver + 1, from_state=last.to_state,
                    to_state="waiting", attempt=0, prev_fence=last.fence,
                    prev_lease_until_ms=0, worker_id="", token_h="", ts_ms=events[-1].ts_ms,
                )
            )  # fmt: skip
    first_ms = events[0].ts_ms
    scale = 3 * DAY_MS // (events[-1].ts_ms - first_ms)
    times = ("ts_ms", "lease_until_ms", "prev_lease_until_ms", "due_ms")

    def moved(ms: int) -> int:
        return MONDAY_MS + (ms - first_ms) * scale if ms else 0

    return [
        msgspec.structs.replace(e, seq=str(n + 1), **{t: moved(getattr(e, t)) for t in times})
        for n, e in enumerate(events)
    ]


def contents(lake: str) -> dict[str, list[str]]:
    """The rows of every table with their day, read without Spark."""
    found = {}
    for file in table_files():
        table = Lake(lake).table(file.name).opened()
        assert table is not None
        rows = table.to_pyarrow_table().to_pylist()
        found[file.name] = sorted(str(dict(sorted(row.items()))) for row in rows)
    return found


def test_bit_by_bit_gives_the_same_tables_and_the_same_audit_as_all_at_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    slowly, at_once = str(tmp_path / "slowly"), str(tmp_path / "at-once")
    events = spread(3)
    cuts = [0, len(events) // 2, len(events)]
    for begin, end in pairwise(cuts):
        put(slowly, events[begin:end], begin)
        update_tables(spark, slowly)
        bit_by_bit = audit_lake(spark, slowly)
    assert not update_tables(spark, slowly).is_new
    put(at_once, events, 0)
    update_tables(spark, at_once)
    assert Lake(at_once).read(spark, "jobs").count() == len({e.job_id for e in events})
    assert contents(slowly) == contents(at_once)
    whole = audit_lake(spark, at_once)
    assert (bit_by_bit.events, bit_by_bit.jobs) == (whole.events, whole.jobs)
    assert bit_by_bit.open_jobs == whole.open_jobs
    assert bit_by_bit.verdicts == whole.verdicts
    assert bit_by_bit.broken == []


def test_damage_in_a_later_part_is_found_with_the_events_of_an_earlier_one(
    spark: SparkSession, lake: str
) -> None:
    events, cut, at = next(filter(None, map(_lease_across, range(2, 50))))
    put(lake, events[:cut], 0)
    assert audit_lake(spark, lake).violations == 0
    events[at] = msgspec.structs.replace(events[at], worker_id="somebody else")
    put(lake, events[cut:], int(events[cut - 1].seq))
    result = audit_lake(spark, lake)
    assert result.jobs == len({event.job_id for event in events})
    assert result.broken == ["I8"]
    found = violations(spark, Lake(lake))
    assert found is not None
    (row,) = found.collect()
    assert row.job_id == events[at].job_id
    assert "accepted from another than the holder" in row.text
    assert len(json.loads(row.evidence)) == 2


def _lease_across(seed: int) -> tuple[list[JournalEvent], int, int] | None:
    """A history, and where to cut it so that a job completes in the second part under a lease of
    the first; None if no job of this seed does.
    """
    events = [
        msgspec.structs.replace(e, seq=str(n + 1))
        for n, e in enumerate(sound(seed).events)
        if e.ver
    ]
    for at, end in enumerate(events):
        before = [n for n, e in enumerate(events[:at]) if e.job_id == end.job_id]
        if end.type == "complete" and events[before[-1]].type == "claim" and at - before[-1] > 1:
            return events, before[-1] + 1, at
    return None


def test_a_run_that_was_killed_is_made_good_by_the_next(spark: SparkSession, lake: str) -> None:
    """Killed after the first of its tables."""
    put(lake, HISTORY, 0)
    update_tables(spark, lake)
    others = [
        msgspec.structs.replace(e, job_id="b", seq=f"{3000 + n}") for n, e in enumerate(HISTORY)
    ]
    put(lake, others, int(HISTORY[-1].seq))
    place = Lake(lake)
    for file in table_files():
        if file.kind == "merge":
            merge(spark, place, file, place.events.positions(["j"]), scratch=False)
            break
    update_tables(spark, lake)
    bit_by_bit = contents(lake)
    assert len(bit_by_bit["jobs"]) == 2
    update_tables(spark, lake, scratch=True)
    assert contents(lake) == bit_by_bit


def test_a_target_is_kept_and_another_one_counts_for_all_days(
    spark: SparkSession, lake: str
) -> None:
    put(lake, HISTORY, 0)
    update_tables(spark, lake, targets={"q": 2_499})
    assert Lake(lake).read(spark, "slo").collect()[0].within == 0
    assert not update_tables(spark, lake).is_new
    update_tables(spark, lake, targets={"": 2_500})
    (row,) = Lake(lake).read(spark, "slo").collect()
    assert (row.target_ms, row.within) == (2_500, 1)


def test_tables_of_a_folder_that_is_no_lake_are_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    with pytest.raises(NotFound, match="is no lake"):
        update_tables(spark, str(tmp_path))


async def test_the_tables_are_in_the_catalog_and_always_the_newest(
    spark: SparkSession, lake: str, streams_url: str
) -> None:
    await work(streams_url, 6, fail_every=3)
    capture(spark, lake, [streams_url], once=True)
    update_tables(spark, lake)
    prepare(spark, lake=lake)
    counted = "select state, count(*) from tenure.jobs group by state order by state"
    assert [tuple(row) for row in spark.sql(counted).collect()] == [("done", 4), ("error", 2)]
    await work(streams_url, 3, prefix="later")
    await trim(streams_url, keep=1)
    capture(spark, lake, [streams_url], once=True)
    update_tables(spark, lake)
    audit_lake(spark, lake)
    assert spark.table("tenure.attempts").count() == sum(
        Lake(lake).table("attempts").parts().values()
    )
    prepare(spark, lake=lake)
    (gap,) = spark.sql("select reason, lost from tenure.gaps").collect()
    assert (gap.reason, gap.lost > 0) == ("trimmed", True)
    verdicts = {
        row.invariant: row.verdict for row in spark.table("tenure.audit_verdicts").collect()
    }
    assert (verdicts["I7"], verdicts["I28"]) == ("sound", "not judged")
    hours = spark.sql("select sum(submitted) from tenure.metrics_hourly").collect()
    assert hours[0][0] >= 6
