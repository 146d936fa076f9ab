"""The history page reads the lake's Delta tables themselves, as the pipeline writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tenure.dashboard.charts import read_history

HOUR_MS = 1_800_000_000_000 - 1_800_000_000_000 % 3_600_000


def row(**fields: object) -> dict[str, object]:
    given: dict[str, object] = {
        "hour_ms": HOUR_MS, "contract": "streams", "queue": "jobs:stream", "task": "chat",
        "worker_id": "w", "submitted": 0, "attempts": 5, "completed": 4, "retried": 1, "dead": 0,
        "lost": 0, "jobs": 4, "p95_wait_ms": 20.0, "p95_run_ms": 90.0,
    }  # fmt: skip
    return given | fields


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    rows = [
        row(day="2026-01-01"),
        row(day="2026-01-01", worker_id="v", p95_run_ms=120.0),
        row(
            day="2026-01-02", hour_ms=HOUR_MS + 86_400_000, queue="mail", contract="bullmq", dead=2
        ),
    ]
    put(tmp_path / "metrics_hourly", rows, "day")
    # A file that the log does not name is left from a run that was killed: it does not count.
    left = next((tmp_path / "metrics_hourly").rglob("*.parquet"))
    shutil.copy(left, left.with_name("left.parquet"))
    put(tmp_path / "events", [{"journal": "gaps", "pos": 1}, {"journal": "a", "pos": 2}], "journal")
    verdict = {"invariant": "I1", "text": "one holder", "contracts": "all", "jobs": 9,
               "violations": 0}  # fmt: skip
    states = [{}, {"total": {"events": 30, "jobs": 9, "verdicts": [verdict]}}]
    runs = [{"run": str(n + 9), "state": json.dumps(state)} for n, state in enumerate(states)]
    put(tmp_path / "audit_runs", runs, "run")
    return tmp_path


def put(folder: Path, rows: list[dict[str, object]], by: str) -> None:
    write_deltalake(folder, pa.Table.from_pylist(rows), partition_by=by)


def test_hours_are_summed_over_tasks_and_workers_newest_first(lake: Path) -> None:
    past = read_history(str(lake))
    assert [(hour.queue, hour.completed, hour.dead) for hour in past.hours] == [
        ("mail", 4, 2),
        ("jobs:stream", 8, 0),
    ]
    assert past.hours[1].p95_run_ms == 120.0
    assert not past.missing
    assert past.gaps == 1


def test_one_queue_is_chosen_by_either_of_its_names(lake: Path) -> None:
    assert [hour.queue for hour in read_history(str(lake), queue="bullmq:mail").hours] == ["mail"]
    assert [hour.queue for hour in read_history(str(lake), queue="mail").hours] == ["mail"]


def test_the_last_audit_is_shown_with_its_invariants(lake: Path) -> None:
    past = read_history(str(lake))
    assert [(each.text, each.jobs) for each in past.verdicts] == [("one holder", 9)]


def test_what_is_missing_is_said_with_the_command_that_makes_it(lake: Path, tmp_path: Path) -> None:
    assert "pipeline capture" in read_history(str(tmp_path / "nowhere")).missing
    shutil.rmtree(lake / "metrics_hourly")
    assert "pipeline tables" in read_history(str(lake)).missing
    assert "gateway.lake" in read_history("s3://bucket/lake").missing
