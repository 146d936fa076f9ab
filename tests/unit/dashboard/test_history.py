"""The history page reads the lake's files themselves, in the layout that the pipeline writes."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

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
    (tmp_path / "lake.json").write_text("{}")
    files = {"metrics_hourly": {}}  # type: ignore[var-annotated]
    for day, rows in {
        "2026-01-01": [row(), row(worker_id="v", p95_run_ms=120.0)],
        "2026-01-02": [row(hour_ms=HOUR_MS + 86_400_000, queue="mail", contract="bullmq", dead=2)],
    }.items():
        path = f"tables/metrics_hourly/day={day}/1.parquet"
        (tmp_path / path).parent.mkdir(parents=True)
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / path)
        files["metrics_hourly"][day] = [path]
    # A file that no list names is left from a run that was killed: it must not be counted.
    parquet.write_table(pa.Table.from_pylist([row()]), (tmp_path / path).parent / "stray.parquet")
    (tmp_path / "tables" / "_manifest.json").write_text(json.dumps({"run": 3, "files": files}))
    (tmp_path / "audit").mkdir()
    verdict = {
        "invariant": "I1",
        "text": "one holder",
        "contracts": "all",
        "jobs": 9,
        "violations": 0,
    }
    state = {"run": 1, "total": {"events": 30, "jobs": 9, "verdicts": [verdict]}}
    (tmp_path / "audit" / "state.json").write_text(json.dumps(state))
    return tmp_path


def test_hours_are_summed_over_tasks_and_workers_newest_first(lake: Path) -> None:
    past = read_history(str(lake))
    assert [(hour.queue, hour.completed, hour.dead) for hour in past.hours] == [
        ("mail", 4, 2),
        ("jobs:stream", 8, 0),
    ]
    assert past.hours[1].p95_run_ms == 120.0
    assert not past.missing


def test_one_queue_is_chosen_by_either_of_its_names(lake: Path) -> None:
    assert [hour.queue for hour in read_history(str(lake), queue="bullmq:mail").hours] == ["mail"]
    assert [hour.queue for hour in read_history(str(lake), queue="mail").hours] == ["mail"]


def test_the_last_audit_is_shown_with_its_invariants(lake: Path) -> None:
    past = read_history(str(lake))
    assert [(each.text, each.jobs) for each in past.verdicts] == [("one holder", 9)]


def test_what_is_missing_is_said_with_the_command_that_makes_it(lake: Path, tmp_path: Path) -> None:
    assert "pipeline capture" in read_history(str(tmp_path / "nowhere")).missing
    (lake / "tables" / "_manifest.json").unlink()
    assert "pipeline tables" in read_history(str(lake)).missing
    assert "gateway.lake" in read_history("s3://bucket/lake").missing
