"""The benchmark harness works: a tiny real run, the table it writes, and a failing peer told apart.

Only contenders that run in the project's own environment take part: nothing is installed here.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOBS = 50
CONTENDERS = ("leasehold", "bare_pipelines")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "run.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of results of one tiny interleaved run of our own contenders."""
    folder = tmp_path_factory.mktemp("results")
    size = ("--jobs", str(JOBS), "--repeats", "2", "--out", str(folder))
    done = run("noop", "--peers", ",".join(CONTENDERS), *size)
    # 8 would be a missed goal: a run of fifty jobs proves nothing about speed.
    assert done.returncode in (0, 8), done.stderr
    return folder


def test_a_tiny_run_measures_every_contender_in_every_round(results: Path) -> None:
    told = json.loads((results / "noop.json").read_text())
    assert sorted(told["contenders"]) == sorted(CONTENDERS)
    for contender in told["contenders"].values():
        assert contender["errors"] == []
        assert len(contender["runs"]) == 2
        for figures in contender["runs"]:
            assert figures["jobs_per_s"] > 0
            # Claim and settle are scripts, so at least one a job's batch, and they call commands.
            assert figures["commands"] > 1
            assert 5 < figures["rss_mb"] < 500


def test_the_summary_holds_the_median_between_the_lowest_and_the_highest(results: Path) -> None:
    told = json.loads((results / "noop.json").read_text())
    for contender in told["contenders"].values():
        rates = sorted(figures["jobs_per_s"] for figures in contender["runs"])
        summary = contender["summary"]["jobs_per_s"]
        assert summary == pytest.approx(
            {"median": sum(rates) / 2, "min": rates[0], "max": rates[1]}
        )


def test_the_table_names_the_machine_and_leaves_no_draft_behind(results: Path) -> None:
    table = (results / "noop.md").read_text()
    for fact in ("cores: ", "cpu: ", "kernel: ", "redis: ", "load before"):
        assert fact in table
    assert "| leasehold |" in table
    assert sorted(path.name for path in results.iterdir()) == ["noop.json", "noop.md"]


def test_an_unknown_contender_is_refused_with_those_there_are() -> None:
    done = run("noop", "--peers", "nobody")
    assert done.returncode == 1
    assert "no contender nobody" in done.stderr
    assert "taskiq" in done.stderr


def test_every_peer_pins_every_package_of_its_environment() -> None:
    """A figure can only be repeated with the versions it was measured with."""
    found = sorted((ROOT / "benchmarks" / "peers").glob("*/requirements.txt"))
    assert len(found) >= 9
    for requirements in found:
        loose = [line for line in requirements.read_text().splitlines() if "==" not in line]
        assert not loose, f"{requirements.parent.name} does not pin {loose}"
