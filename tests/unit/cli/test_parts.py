"""Small parts of the command line that need no store."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest

import tenure.cli
import tenure.tasks
from tenure.cli import doctor
from tenure.cli.doctor import clock_finding, version_finding
from tenure.cli.gateway_client import GatewayClient, parse_sse
from tenure.cli.up import UpOptions, how_to_call, welcome
from tenure.contracts.streams import doctor as streams_doctor
from tenure.contracts.streams.samples import sample
from tenure.core.errors import UsageError
from tenure.tasks import TASKS

MODULES = [
    module.name
    for package in (tenure.cli, tenure.tasks)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_samples_are_mostly_good_some_retried_and_few_lost() -> None:
    chance = random.Random(1)
    jobs = [sample(TASKS[n % 6], chance) for n in range(3000)]
    plays = [msgspec.json.decode(job.payload)["sample"] for job in jobs]
    fails = Counter(play["fail"] for play in plays)
    assert 0.02 < fails[9] / 3000 < 0.06
    assert 0.09 < fails[1] / 3000 < 0.15
    assert all(job.ttl_ms for job in jobs)


def test_the_welcome_can_be_copied_with_its_live_port() -> None:
    node = "from Node       new Queue('q')"
    url = "http://127.0.0.1:9999"
    text = welcome(url, url, [node], how_to_call(Path(".tenure")), samples=True)
    assert text.count("curl -s") == 3
    assert "  from Node       new Queue('q')" in text.splitlines()
    assert "8470" not in text
    assert "TENURE_DATA" not in text


def test_data_that_lie_elsewhere_are_named_to_the_other_commands(tmp_path: Path) -> None:
    assert how_to_call(tmp_path / "my data").startswith(f"TENURE_DATA='{tmp_path}/my data' ")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8470"),
        ("0.0.0.0", "http://127.0.0.1:8470"),
        ("::", "http://[::1]:8470"),
        ("::1", "http://[::1]:8470"),
        ("box.example", "http://box.example:8470"),
    ],
)
def test_the_gateway_is_named_by_an_address_that_can_be_opened(host: str, url: str) -> None:
    from pathlib import Path

    wish = UpOptions(
        host, 8470, Path(), "", samples=False, node=False, browser=False, drain_timeout_s=1
    )
    assert wish.gateway_url == url


def test_server_sent_events_become_job_events_and_hello_does_not() -> None:
    assert list(parse_sse(["retry: 2000", "event: hello", "data: {}", ""])) == []
    assert list(parse_sse([": heartbeat", ""])) == []
    news = '{"type":"token","ts":7,"step":"model","data":{"text":"a: b"}}'
    (event,) = parse_sse(["id: 5-0", "event: token", f"data: {news}", ""])
    assert (event.event_id, event.type, event.ts_ms, event.step) == ("5-0", "token", 7, "model")
    assert event.data == b'{"text":"a: b"}'


@pytest.mark.parametrize(
    ("info", "level"),
    [
        ({"redis_version": "6.0.16"}, "problem"),
        ({"redis_version": "6.2.14"}, "note"),
        ({"redis_version": "7.0.15"}, "ok"),
        ({"redis_version": "7.2.4", "valkey_version": "9.0.0"}, "ok"),
    ],
)
def test_the_doctor_knows_which_servers_are_too_old(info: dict[str, str], level: str) -> None:
    assert version_finding(info).level == level


@pytest.mark.parametrize(
    ("skew_ms", "level"), [(5, "ok"), (-900, "ok"), (-1500, "note"), (40_000, "problem")]
)
def test_the_doctor_notices_clocks_that_disagree(skew_ms: int, level: str) -> None:
    assert clock_finding(skew_ms).level == level


def test_an_address_that_is_no_gateway_is_told() -> None:
    with pytest.raises(UsageError, match=r"one looks like http://127\.0\.0\.1:8470"):
        GatewayClient("127.0.0.1:8470")


def test_every_finding_of_the_doctor_that_is_not_ok_has_a_remedy() -> None:
    """In the code itself: there is no finding without one that somebody may meet some day."""
    without, seen = [], 0
    nodes = [
        node
        for module in (doctor, streams_doctor)
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
    ]
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        names = {keyword.arg for keyword in node.keywords}
        level = node.args[0] if node.args else None
        if node.func.id == "Finding" and getattr(level, "value", "") != "ok":
            seen += 1
            if len(node.args) < 4 and "remedy" not in names:
                without.append(node.lineno)
        elif node.func.id == "make_finding":
            seen += 1
            if "remedy" not in names:
                without.append(node.lineno)
    assert seen > 20
    assert not without
