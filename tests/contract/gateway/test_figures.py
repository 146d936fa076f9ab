"""What Prometheus and Grafana get: good names, and no panel or alert over a missing metric."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tenure.core.outcome import VERDICT_NAMES
from tenure.core.portable import STATES
from tenure.worker.events import Metrics
from tests.contract.gateway.conftest import Site

ROOT = Path(__file__).parents[3]
BOARD = json.loads((ROOT / "deploy" / "grafana" / "tenure.json").read_text())
MONITORING = ROOT / "deploy" / "kubernetes" / "monitoring"
RULES = yaml.safe_load((MONITORING / "rules.yaml").read_text())["spec"]
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
PANELS = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
EXPRESSIONS = [*PANELS, *(rule["expr"] for rule in ALERTS)]
UNITS = ("_seconds", "_bytes", "_total", "_info")
# What a name counts or measures when it has no unit: things, or yes and no.
PLAIN = re.compile(r"tenure_(queue_(depth|workers|paused)|store_up|sse_clients|slots(_used)?)$")


def worker_page() -> str:
    registry = CollectorRegistry()
    metrics = Metrics(registry, lambda: (1, 2))
    tally = metrics.tally("q", "t")
    metrics.quarantined["q"] = 1
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


def promtool() -> str:
    """bin/test brings it; whoever calls pytest without has not seen these tests hold."""
    found = shutil.which("promtool", path=f"{os.environ['PATH']}:{ROOT / '.tools'}")
    if found is None:
        pytest.skip("no promtool on PATH nor in .tools: bin/test brings it")
    return found


async def test_promtool_has_nothing_to_say(pages: dict[str, str]) -> None:
    for page in pages.values():
        done = subprocess.run(
            [promtool(), "check", "metrics"], input=page, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def labels_by_metric(pages: dict[str, str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for page in pages.values():
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def test_every_panel_and_alert_asks_for_metrics_and_labels_that_there_are(
    pages: dict[str, str],
) -> None:
    there = labels_by_metric(pages)
    for expression in EXPRESSIONS:
        asked = re.findall(r"(tenure_[a-z_]+)(?:\{([^}]*)\})?", expression)
        assert asked, expression
        for name, selector in asked:
            assert name in there, name
            assert set(re.findall(r"(\w+)=", selector)) <= there[name], expression
        grouped = re.findall(r"(?:by|on) \(([^)]*)\)", expression)
        labels = set().union(*(there[name] for name, _ in asked))
        assert {word for words in grouped for word in words.split(", ")} <= labels, expression
    assert len({name for each in EXPRESSIONS for name in re.findall(r"tenure_[a-z_]+", each)}) > 15


async def test_the_variables_of_the_board_are_labels_and_all_are_used(
    pages: dict[str, str],
) -> None:
    there = labels_by_metric(pages)
    variables = {each["name"]: each["query"] for each in BOARD["templating"]["list"]}
    for query in variables.values():
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label in there[metric]
    used = {
        (label, name) for each in PANELS for label, name in re.findall(r'(\w+)=~"\$(\w+)"', each)
    }
    assert {name for _, name in used} == set(variables)
    assert all(label == name for label, name in used)


def test_figures_that_every_gateway_reports_are_not_added_up() -> None:
    shared = r"tenure_(?:queue_\w+|oldest_waiting_seconds|store_up)"
    for expression in EXPRESSIONS:
        for match in re.finditer(shared, expression):
            before = expression[: match.start()]
            assert re.search(r"(max|min)(?: by \([^)]*\))? \($|(max|min|absent)\($", before), (
                expression
            )


def test_panels_and_alerts_ask_for_outcomes_and_states_that_there_are() -> None:
    known: dict[str, set[str]] = {"outcome": {*VERDICT_NAMES.values()}, "state": {*STATES}}
    for label, words in known.items():
        asked = {
            word
            for expression in EXPRESSIONS
            for given in re.findall(rf'\b{label}=~?"([^"]+)"', expression)
            for word in given.split("|")
        }
        assert asked
        assert asked <= words


def test_the_alerts_fire_as_their_tests_say(tmp_path: Path) -> None:
    """Every alert has a test in which it fires; promtool runs them."""
    (tmp_path / "tenure.rules.yaml").write_text(yaml.safe_dump(RULES))
    tests = yaml.safe_load((MONITORING / "rules.test.yaml").read_text())
    fired = {
        case["alertname"]
        for each in tests["tests"]
        for case in each.get("alert_rule_test", [])
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in ALERTS}
    shutil.copy(MONITORING / "rules.test.yaml", tmp_path)
    for words in (["check", "rules", "tenure.rules.yaml"], ["test", "rules", "rules.test.yaml"]):
        done = subprocess.run([promtool(), *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_board_can_be_imported_into_any_grafana() -> None:
    assert BOARD["__inputs"][0]["name"] == "DS_PROMETHEUS"
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in BOARD["panels"]:
        assert panel["datasource"]["uid"] == "${DS_PROMETHEUS}"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
