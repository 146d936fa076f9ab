"""The same commands through a Spark Connect server: everything but an address is as it was."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tenure.core.errors import UsageError
from tenure.pipeline.session import SparkSettings, open_session
from tests.spark.connecting import connect_server
from tests.spark.typing_commands import typed
from tests.spark.working import journal_of, lake_rows, work


@pytest.mark.few
@pytest.mark.timeout(900)
async def test_a_connect_server_captures_audits_counts_and_reports(
    tmp_path: Path, streams_url: str
) -> None:
    await work(streams_url, 20, fail_every=10)
    events = len(await journal_of(streams_url))
    with connect_server(tmp_path) as address:
        # A relative path is the client's; the server may run in another folder.
        captured, audited, reported = typed(
            tmp_path,
            ["capture", "--once", "-q", streams_url],
            ["audit", "--json"],
            ["report"],
            where=["--remote", address],
        )
    assert captured == (0, f"{events:,} new events; lake holds {events:,}\n")
    assert len(lake_rows(str(tmp_path / "lake"))) == events
    assert audited[0] == 0
    assert json.loads(audited[1])["jobs"] == 20
    assert reported == (0, "report.html\n")
    assert "Throughput" in (tmp_path / "report.html").read_text()


def test_without_what_connect_needs_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    for name in [name for name in sys.modules if name.startswith("pyspark.sql.connect")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError, match=r"pip install 'tenure\[spark\]'") as told:
        open_session(SparkSettings(remote="sc://127.0.0.1:1"))
    assert "\n" not in str(told.value)
