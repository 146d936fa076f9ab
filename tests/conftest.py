"""What holds in every lane: skips are failures where they matter, and each lane is counted.

bin/test runs pytest in up to two phases (see bin/lanes.py); `--phase` picks the tests of one.
"""

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent
# Lanes that share something too slow or too large to have more than once.
ONE_PROCESS = ("spark",)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("leasehold")
    group.addoption(
        "--no-skips",
        action="store_true",
        default=os.environ.get("CI", "").lower() in ("1", "true"),
        help="a skipped test is a failed test (always on with CI=true)",
    )
    group.addoption(
        "--phase",
        choices=("all", "together", "alone"),
        default="all",
        help="run only tests that stand company, or only those that do not (default: all)",
    )
    group.addoption(
        "--draw",
        action="store_true",
        help="write the diagrams that tests draw into the pages that show them",
    )


def lane_of(nodeid: str) -> str:
    """`tests/unit/core/test_retry.py::test_x` is in lane `unit`."""
    parts = nodeid.split("::")[0].split("/")
    return parts[1] if len(parts) > 2 else parts[0]


class Scheduling(LoadScopeScheduling):
    """Every test by itself to whichever process is free, but all of Spark's to one.

    The marks that the plugin offers for this are lost on the way with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        lane = lane_of(nodeid)
        return lane if lane in ONE_PROCESS else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """tests/chaos but for its simulation is `alone`; then keep the tests of the phase asked for."""
    for item in items:
        chaos = item.path.is_relative_to(TESTS / "chaos")
        if chaos and not item.path.is_relative_to(TESTS / "chaos" / "sim"):
            item.add_marker("alone")
    phase = config.getoption("--phase")
    if phase == "all":
        return
    alone = {item for item in items if item.get_closest_marker("alone")}
    # Left for the other phase, not deselected: whoever reads "deselected" should think of -k.
    items[:] = [item for item in items if (item in alone) == (phase == "alone")]
    # The longest lane that keeps to one process begins first: nobody waits for it at the end.
    items.sort(key=lambda item: not item.path.is_relative_to(TESTS / "spark"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skips"):
        report.outcome = "failed"
        report.when = "call"  # a mark skips during set-up, and a failure there would be an "error"
        report.longrepr = f"skipped, which counts as failed here: {_reason(report.longrepr)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and collector.config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which counts as failed here: {_reason(report.longrepr)}"
    return report


def _reason(longrepr: object) -> str:
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)


class LaneTally:
    """Counts tests and seconds by lane, and adds them to the file that bin/lanes.py sums up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, set[str]] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lane = lane_of(report.nodeid)
        self._tests.setdefault(lane, set()).add(report.nodeid)
        self._seconds[lane] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        stats = terminalreporter.stats
        names = ("passed", "failed", "error", "xfailed", "xpassed", "skipped", "deselected")
        part = {
            "outcomes": {name: len(stats.get(name, [])) for name in names},
            "tests": {lane: len(nodeids) for lane, nodeids in self._tests.items()},
            "seconds": dict(self._seconds),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(part) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    tally = os.environ.pop("LEASEHOLD_TALLY", None)  # not for a pytest that a test starts
    if tally and not hasattr(config, "workerinput"):
        config.pluginmanager.register(LaneTally(Path(tally)), "lane-tally")
