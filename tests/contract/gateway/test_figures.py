"""What Prometheus and Grafana get: names by the conventions, and no panel over a missing metric."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tenure.core.outcome import VERDICT_NAMES
from tenure.worker.events import Metrics
from tests.contract.gateway.conftest import Site

ROOT = Path(__file__).parents[3]
BOARD = json.loads((ROOT / "deploy" / "grafana" / "tenure.json").read_text())
UNITS = ("_seconds", "_bytes", "_total", "_info")
# What a name counts or measures when it has no unit: things, or yes and no.
PLAIN = re.compile(r"tenure_(queue_(depth|workers|paused)|store_up|sse_clients|slots(_used)?)$")


def worker_page() -> str:
    registry = CollectorRegistry()
    metrics = Metrics(registry, lambda: (1, 2))
    tally = metrics.tally("q", "t")
    tally.started, tally.retried, tally.lost = 3, 1, 1
    tally.finished = dict.fromkeys(VERDICT_NAMES.values(), 1)
    tally.wait.observe(0.02)
    tally.run.observe(0.5)
    return generate_latest(registry).decode()


@pytest.fixture
async def pages(site: Site) -> dict[str, str]:
    web = await site.web()
    await web.submit()
    await web.get("/v1/jobs")
    first = await web.get("/metrics")
    assert first.status == 200
    return {"gateway": (await web.get("/metrics")).body.decode(), "worker": worker_page()}


async def test_every_name_follows_the_conventions(pages: dict[str, str]) -> None:
    problems = []
    for who, page in pages.items():
        for family in text_string_to_metric_families(page):
            name = family.name + ("_total" if family.type == "counter" else "")
            if not family.documentation:
                problems.append(f"{who} {name}: no help")
            if not (name.endswith(UNITS) or PLAIN.fullmatch(name)):
                problems.append(f"{who} {name}: no unit")
            labels = {label for sample in family.samples for label in sample.labels}
            if labels & {"job", "job_id", "instance"}:
                problems.append(f"{who} {name}: a label that Prometheus sets or that never ends")
            if not name.startswith("tenure_"):
                problems.append(f"{who} {name}: not ours")
    assert not problems, problems


async def test_promtool_has_nothing_to_say(pages: dict[str, str]) -> None:
    """bin/test brings it; whoever calls pytest without has not seen this hold."""
    promtool = shutil.which("promtool", path=f"{os.environ['PATH']}:{ROOT / '.tools'}")
    if promtool is None:
        pytest.skip("no promtool on PATH nor in .tools: bin/test brings it")
    for page in pages.values():
        done = subprocess.run(
            [promtool, "check", "metrics"], input=page, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


async def test_every_panel_of_the_board_asks_for_a_metric_that_there_is(
    pages: dict[str, str],
) -> None:
    there = {
        sample.name
        for page in pages.values()
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    there |= {f"{name}_bucket" for name in there}
    asked = {
        name
        for panel in BOARD["panels"]
        for target in panel["targets"]
        for name in re.findall(r"tenure_[a-z_]+", target["expr"])
    }
    assert asked - there == set()
    assert len(asked) >= 12


def test_the_board_asks_for_outcomes_that_there_are() -> None:
    asked = {
        outcome
        for panel in BOARD["panels"]
        for target in panel["targets"]
        for outcomes in re.findall(r'outcome=~?"([^"]+)"', target["expr"])
        for outcome in outcomes.split("|")
    }
    assert asked
    assert asked <= set(VERDICT_NAMES.values())


def test_the_board_can_be_imported_into_any_grafana() -> None:
    assert BOARD["__inputs"][0]["name"] == "DS_PROMETHEUS"
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in BOARD["panels"]:
        assert panel["datasource"]["uid"] == "${DS_PROMETHEUS}"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
