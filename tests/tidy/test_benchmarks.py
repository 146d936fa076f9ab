"""The benchmark harness works: a tiny real run, the table it writes, and a failing peer told apart.

Only contenders that run in the project's own environment take part: nothing is installed here.
"""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness import comparison, scaling

ROOT = Path(__file__).resolve().parents[2]
JOBS = 50
CONTENDERS = ("tenure", "bare_pipelines")


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
    assert "| tenure |" in table
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


def test_the_comparison_shows_the_figures_of_the_committed_results() -> None:
    """All of them, also where a goal was missed; after new results: `benchmarks/run.py --page`."""
    page, readme = comparison.PAGE.read_text(), comparison.README.read_text()
    assert page == comparison.refreshed(page), "run python benchmarks/run.py --page"
    assert readme == comparison.speed(readme), "run python benchmarks/run.py --page"
    for path in comparison.RESULTS.rglob("*.md"):
        assert f"(../../benchmarks/results/{path.relative_to(comparison.RESULTS)})" in page
        missed = len(re.findall(r"\(\*\*missed\*\*\)$", path.read_text(), re.MULTILINE))
        source = f"[{path.relative_to(comparison.RESULTS)}]"
        assert sum(source in line for line in page.splitlines()) == missed


def test_a_changed_figure_makes_comparison_and_readme_others(tmp_path: Path) -> None:
    shutil.copytree(comparison.RESULTS, tmp_path, dirs_exist_ok=True)
    page, readme = comparison.PAGE.read_text(), comparison.README.read_text()
    assert comparison.refreshed(page, tmp_path) == page
    table = tmp_path / "noop.md"
    table.write_text(table.read_text().replace("| tenure | ", "| tenure | 9"))
    changed = comparison.refreshed(page, tmp_path)
    assert changed != page
    assert comparison.refreshed(changed) == page
    assert comparison.speed(readme, tmp_path) != readme


def test_a_scenario_without_a_row_of_its_own_is_shown_by_its_headline(tmp_path: Path) -> None:
    (tmp_path / "new.md").write_text(
        "# Something new\n\n|  | jobs/s | jobs/s / best peer |\n| --- | --- | --- |\n"
        "| tenure_new | 1,000 (900 to 1,100) | 4.00 |\n| other | 250 (200 to 300) | 1.00 |\n"
    )
    marks = "".join(comparison.FIGURES)
    row = "| Something new | 1,000 | 250 (other) | 4.0 | [new](../../benchmarks/results/new.md) |"
    assert row in comparison.refreshed(marks, tmp_path)


def test_the_tables_and_the_documents_of_results_hold_the_same_figures() -> None:
    for path in comparison.RESULTS.rglob("*.json"):
        told = json.loads(path.read_text())
        lines = path.with_suffix(".md").read_text().splitlines()
        assert lines[0] == f"# {told['title']}"
        rows = {line.split(" | ")[0].strip("| "): line for line in lines if line.startswith("| ")}
        for name, contender in told["contenders"].items():
            for spread in contender["summary"].values():
                if spread is not None:
                    shapes = {f"{spread['median']:,.{digits}f}" for digits in range(4)}
                    assert any(f"| {shape} " in rows[name] for shape in shapes), (path.name, name)


COSTS = scaling.Costs(
    redis_us=60.0,
    worker_us=12.0,
    submitter_us=15.0,
    gateway_us=120.0,
    network_bytes=500.0,
    kept_bytes=2_000.0,
)
PLAN = scaling.Plan(busy=0.6, replicas=1, kept_s=100, redis_gb=20, core_h=0.1, gb_h=0.01)


def test_nodes_and_money_follow_from_the_costs_of_a_job() -> None:
    """100,000 jobs a second: 6 s of Redis CPU a second, and 20 GB of jobs of the last 100 s."""
    found = scaling.need(100_000, COSTS, PLAN)
    assert (found.by_cpu, found.by_memory, found.primaries) == (10, 1, 10)
    assert (found.worker_cores, found.submitter_cores, found.gateway_cores) == (2, 3, 20)
    assert (found.queues, found.clusters, found.network_mb_per_s) == (1, 1, 50.0)
    assert found.redis_money == pytest.approx(20 * (0.1 + 20 * 0.01) * 730)
    assert found.worker_money == pytest.approx(2 * (0.1 + 2 * 0.01) * 730)


def test_jobs_that_are_kept_for_long_need_primaries_for_memory() -> None:
    longer = replace(PLAN, kept_s=86_400)
    found = scaling.need(100_000, COSTS, longer)
    assert (found.by_cpu, found.by_memory, found.primaries) == (10, 864, 864)
    assert (found.queues, found.clusters) == (7, 2)


def test_the_page_of_scaling_shows_what_follows_from_the_committed_results(
    tmp_path: Path,
) -> None:
    """After new results: `benchmarks/run.py --page`. With another cost it is another page."""
    page = scaling.PAGE.read_text()
    assert page == scaling.refreshed(page), "run python benchmarks/run.py --page"
    shutil.copytree(comparison.RESULTS, tmp_path, dirs_exist_ok=True)
    results = tmp_path / "cluster.json"
    told = json.loads(results.read_text())
    told["contenders"]["primaries_3"]["summary"]["redis_cpu_us"]["median"] *= 2
    results.write_text(json.dumps(told))
    changed = scaling.refreshed(page, tmp_path)
    assert changed != page
    assert scaling.refreshed(changed) == page
    with pytest.raises(ValueError, match="the page needs the lines"):
        scaling.refreshed("no figures")


def test_a_tiny_run_on_two_primaries_spreads_the_jobs_over_both(tmp_path: Path) -> None:
    size = ("--jobs", "300", "--repeats", "1", "--out", str(tmp_path))
    done = run("cluster", "--peers", "primaries_2", *size)
    assert done.returncode in (0, 8), done.stderr
    (figures,) = json.loads((tmp_path / "cluster.json").read_text())["contenders"]["primaries_2"][
        "runs"
    ]
    assert figures["jobs_per_s"] > 0
    assert 1 <= figures["balance"] < 1.9
    assert figures["kept_bytes"] > figures["net_bytes"] / 10 > 0
