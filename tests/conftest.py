"""What holds in every suite: skips are failures where they matter, and each suite is counted.

bin/test runs pytest in up to three phases (see bin/suites.py); `--phase` picks the tests of one.
"""

import gc
import json
import os
import signal
from collections import defaultdict
from collections.abc import Generator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# A shell's background job ignores Ctrl-C, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes tells what else the machine does.
hypothesis.settings.register_profile("tenure", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("tenure")

TESTS = Path(__file__).parent
# What shares something too slow or too large to have more than once, the slowest first: a Spark, a
# browser, a whole `tenure up`, an environment of the lowest versions, the built documentation, the
# syntax trees of all files. Each goes to one process, and before all the others.
ONE_PROCESS = (
    "tests/spark/",
    "tests/browser/test_actions.py",
    "tests/browser/test_conduct.py",
    "tests/browser/test_pages.py",
    "tests/contract/cli/test_up_at_work.py",
    "tests/interop/lowest/",
    "tests/tidy/test_clauses.py",
    "tests/tidy/test_site.py",
    "tests/tidy/test_structure.py",
)
# What takes long or keeps a processor busy, the longest first: spread among the many tests that
# mostly wait.
BUSY = (
    "tests/fuzz/",
    "tests/tidy/test_tools.py",
    "tests/tidy/test_secrets.py",
    "tests/tidy/test_commands.py",
    "tests/chaos/sim/test_simulation.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tenure")
    group.addoption(
        "--no-skips",
        action="store_true",
        default=os.environ.get("CI", "").lower() in ("1", "true"),
        help="a skipped test is a failed test (always on with CI=true)",
    )
    group.addoption(
        "--phase",
        choices=("all", "together", "few", "alone"),
        default="all",
        help="run only tests that stand much company, or little, or none (default: all)",
    )
    group.addoption(
        "--draw",
        action="store_true",
        help="write the diagrams that tests draw into the pages that show them",
    )


def suite_of(nodeid: str) -> str:
    """`tests/unit/core/test_retry.py::test_x` is in suite `unit`."""
    parts = nodeid.split("::")[0].split("/")
    return parts[1] if len(parts) > 2 else parts[0]


def sharing(nodeid: str) -> str:
    """Which entry of `ONE_PROCESS` a test is of; nothing for those that share nothing."""
    return next((path for path in ONE_PROCESS if nodeid.startswith(path)), "")


def place(nodeid: str, paths: Sequence[str]) -> int:
    """Which of the paths a test is under; their number for none."""
    return next((at for at, path in enumerate(paths) if nodeid.startswith(path)), len(paths))


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """What keeps to one process begins first; busy tests at equal distances among the others.

    None of either is in the last fifth, so that nobody waits for it at the end.
    """
    shared = [item for item in items if sharing(item.nodeid)]
    shared.sort(key=lambda item: place(item.nodeid, ONE_PROCESS))
    rest = [item for item in items if not sharing(item.nodeid)]
    busy = [item for item in rest if place(item.nodeid, BUSY) < len(BUSY)]
    busy.sort(key=lambda item: place(item.nodeid, BUSY), reverse=True)
    others = [item for item in rest if place(item.nodeid, BUSY) == len(BUSY)]
    distance = max(1, len(others) * 4 // 5 // max(1, len(busy)))
    mixed = []
    for at, item in enumerate(others):
        if busy and at % distance == 0:
            mixed.append(busy.pop())
        mixed.append(item)
    return [*shared, *mixed, *reversed(busy)]


class Scheduling(LoadScopeScheduling):
    """Every test by itself to whichever process is free, but all that share something to one.

    The marks that the plugin offers for this are lost on the way with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return sharing(nodeid) or nodeid

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        """What is done is forgotten: the plugin would count through all of it after every test."""
        nodeid = self.registered_collections[node][item_index]
        scope = self._split_scope(nodeid)
        unit = self.assigned_work[node][scope]
        unit[nodeid] = True
        if all(unit.values()):
            del self.assigned_work[node][scope]
        self._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return Scheduling(config, log)


def phase_of(item: pytest.Item) -> str:
    """tests/chaos but for its simulation runs with `few` others, and what is `alone` with none."""
    if item.get_closest_marker("alone"):
        return "alone"
    chaos = TESTS / "chaos"
    kills = item.path.is_relative_to(chaos) and not item.path.is_relative_to(chaos / "sim")
    return "few" if kills or item.get_closest_marker("few") else "together"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the phase asked for, in the order of `in_order`."""
    phase = config.getoption("--phase")
    if phase == "all":
        return
    # Left for the other phases, not deselected: whoever reads "deselected" should think of -k.
    items[:] = in_order([item for item in items if phase_of(item) == phase])


def pytest_collection_finish() -> None:
    """Some hundred thousand objects that stay to the end need not be looked through for garbage."""
    gc.collect()
    gc.freeze()


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
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Log lines of a test may hold half a surrogate pair, which xdist cannot send."""
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {name: _encodable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_encodable, value))
    return value


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


@pytest.fixture(scope="session")
def servers() -> Generator[Any]:
    """Of this process, for every suite whose tests keep to a name or a schema of their own."""
    servers = import_module("tests.contract.adapters").Servers()
    yield servers
    servers.stop()


class SuiteTally:
    """Counts tests and seconds by suite, and adds them to the file that bin/suites.py sums up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, set[str]] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        suite = suite_of(report.nodeid)
        self._tests.setdefault(suite, set()).add(report.nodeid)
        self._seconds[suite] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        stats = terminalreporter.stats
        names = ("passed", "failed", "error", "xfailed", "xpassed", "skipped", "deselected")
        part = {
            "outcomes": {name: len(stats.get(name, [])) for name in names},
            "tests": {suite: len(nodeids) for suite, nodeids in self._tests.items()},
            "seconds": dict(self._seconds),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(part) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    tally = os.environ.pop("TENURE_TALLY", None)  # not for a pytest that a test starts
    if tally and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SuiteTally(Path(tally)), "suite-tally")
