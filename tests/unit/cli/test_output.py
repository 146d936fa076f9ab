"""Colours where they are wanted, tables that line up, and secrets that stay hidden."""

from __future__ import annotations

import io
import json

import pytest

from tenure.cli.console import ago, job_object, paint, plain_json, run, safe_url, shown, table
from tenure.cli.jobs import event_line
from tenure.cli.queues import _schedule_object, _schedule_row
from tenure.core.job import JobEvent, JobRecord, JobTemplate, Schedule


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_only_on_a_terminal_and_not_against_no_color(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert shown(paint("x", "red", Terminal())) == "\x1b[31mx\x1b[0m"
    assert paint("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", "red", Terminal()) == "x"


def test_a_table_lines_up_by_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    red = paint("long", "red", Terminal())
    lines = shown(table(["A", "B"], [[red, "x"], ["s", "y"]])).splitlines()
    assert [
        line.replace("\x1b[31m", "").replace("\x1b[0m", "").index(c)
        for line, c in zip(lines, "Bxy", strict=True)
    ] == [6, 6, 6]


def test_ages_use_the_largest_unit_that_says_enough() -> None:
    assert [ago(1, s * 1000 + 1) for s in (0, 59, 60, 3600, 90_000)] == [
        "0s",
        "59s",
        "1m",
        "1h",
        "1d",
    ]


def test_a_payload_that_is_not_json_is_shown_raw() -> None:
    record = JobRecord(
        job_id="j", contract="streams", queue="q", task="t", state="queued", payload=b"{oops"
    )
    shown = job_object(record)
    assert (shown["payload"], shown["result"]) == ({"_raw": "{oops"}, None)
    assert plain_json(b"\xff") == {"_raw": "\ufffd"}


def test_an_event_line_has_time_type_step_and_data() -> None:
    event = JobEvent(event_id="1-0", type="token", ts_ms=3_723_004, step="model", data=b'{"a":1}')
    assert event_line(event).split() == ["01:02:03.004", "token", "model", '{"a":1}']


def test_a_password_is_never_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert safe_url("streams+redis://u:s3cret@h:1/0") == "streams+redis://u:***@h:1/0"
    monkeypatch.setenv("TENURE_QUEUE_URL", "streams+redis://u:s3cret@h:1/0")
    monkeypatch.setenv("TENURE_LLM_KEY", "s3cret")
    monkeypatch.setenv("TENURE_REDIS_URL", "redis://u:s3cret@h:1/0")
    assert run(["config", "show", "--origin"]) == 0
    assert run(["config", "show", "--json"]) == 0
    out = capsys.readouterr().out
    assert "s3cret" not in out
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert {row["name"]: row["value"] for row in rows}["llm.key"] == "***"


def test_a_schedule_whose_time_no_date_can_show_is_listed_with_the_others() -> None:
    made = Schedule(name="n", template=JobTemplate(task="t"), every_ms=10**15, next_ms=10**15)
    assert _schedule_row(_schedule_object(made))[3] == "9999-12-31 23:59:59 UTC"
