"""What to page about: a service level that was missed, a promise that was broken."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from tenure.cli.console import Exit, run
from tenure.core.errors import NotFound
from tenure.pipeline.audit.lakes import State
from tenure.pipeline.audit.run import Audited, Verdict
from tenure.pipeline.lake import Lake
from tenure.pipeline.report.figures import alerts


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path / "lake"))
    made.begin()
    return made


def put_levels(lake: Lake) -> None:
    """Yesterday all was lost; today one of two queues is late."""
    rows = [
        {"contract": "bullmq", "queue": queue, "target_ms": 60_000, "finished": 200, "share": share,
         "day": day}
        for day, queue, share in (
            ("2026-11-15", "video", 0.1), ("2026-11-16", "video", 0.98), ("2026-11-16", "mail", 1.0)
        )
    ]  # fmt: skip
    table = pa.Table.from_pylist(rows)
    lake.table("slo").create(table.schema, "day")
    lake.table("slo").put(table, "day")


def put_audit(lake: Lake, violations: int) -> None:
    verdict = Verdict(
        invariant="I7", text="exclusion", contracts="all", jobs=9, violations=violations,
        unobserved=0,
    )  # fmt: skip
    total = Audited(events=9, jobs=9, open_jobs=0, begins_late=0, looked_at=0, verdicts=[verdict])
    state = msgspec.json.encode(State(run=1, runs=[1], total=total)).decode()
    table = pa.Table.from_pylist([{"run": "1", "state": state}])
    lake.table("audit_runs").create(table.schema, "run")
    lake.table("audit_runs").put(table, "run")


@pytest.mark.parametrize(
    ("shares", "pages"), [({"": 0.9}, 0), ({"": 0.99}, 1), ({"mail": 1.0}, 0), ({"video": 0.99}, 1)]
)
def test_a_queue_below_its_level_on_the_newest_day_is_named(
    lake: Lake, shares: dict[str, float], pages: int
) -> None:
    put_levels(lake)
    found = alerts(lake, shares)
    assert len(found) == pages
    for line in found:
        assert line == (
            "bullmq video: 98.0% of 200 jobs ended well within 60 s on 2026-11-16; wanted 99.0%"
        )


def test_a_broken_promise_is_a_page_and_the_exit_code_says_so(
    lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    put_levels(lake)
    put_audit(lake, violations=0)
    assert run(["pipeline", "check", "--lake", lake.name]) == Exit.OK
    lake.table("audit_runs").remove_all_but([])
    put_audit(lake, violations=2)
    capsys.readouterr()
    assert run(["pipeline", "check", "--lake", lake.name]) == Exit.PROBLEMS
    assert capsys.readouterr().out == "I7 was broken 2 times: exclusion\n"
    assert run(["pipeline", "check", "--lake", lake.name, "--slo", "video=2"]) == Exit.USAGE


def test_without_tables_the_command_that_makes_them_is_named(lake: Lake) -> None:
    with pytest.raises(NotFound, match="pipeline tables"):
        alerts(lake, {})
