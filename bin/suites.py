"""The suites of bin/test: which tests were asked for, in which order they run, what came of it.

Tests run side by side first. Those of tests/chaos, which kill things, and those marked `few`, which
start many processes or wait most of their time, follow in a second pytest run, a few at a time;
those that measure are marked `alone` and follow in a third, one at a time.
tests/conftest.py sorts them into the phases and adds what each run counted to a tally file, from
which the closing lines are made.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"

USAGE = 2
# pytest's own exit codes; after an interrupt or a wrong option there is no further phase.
NO_TESTS = 5
GOES_ON = (0, 1, NO_TESTS)
EXIT_FIRST = {"-x", "--exitfirst"}
FEW = 4
COUNTED = ("outcomes", "tests", "seconds")


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for."""

    suites: tuple[str, ...]
    targets: tuple[str, ...]
    options: tuple[str, ...]

    @property
    def narrowed(self) -> bool:
        """True when a suite may rightly be left without tests."""
        return bool(self.options) or not self.suites

    @property
    def stops_at_first(self) -> bool:
        """True when the first failure is to end it all."""
        return bool(EXIT_FIRST & set(self.options))


class UnknownSuite(Exception):
    """A word before the options was neither a suite nor a path under the project's root."""


def known_suites(tests: Path) -> list[str]:
    """The folders of tests/ that hold tests, by name."""
    folders = (path for path in tests.iterdir() if path.is_dir())
    return sorted(path.name for path in folders if any(path.rglob("test_*.py")))


def parse(words: Sequence[str], tests: Path) -> Request:
    known = known_suites(tests)
    first_option = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    suites, paths = [], []
    for word in words[:first_option]:
        if word in known:
            suites.append(word)
        elif (tests.parent / word.split("::")[0]).exists():
            paths.append(word)
        else:
            raise UnknownSuite(f"no suite {word!r}; the suites are: {', '.join(known)}")
    if not suites and not paths:
        suites = known
    targets = [f"{tests.name}/{suite}" for suite in suites] + paths
    return Request(tuple(suites), tuple(targets), tuple(words[first_option:]))


def phases(targets: Sequence[str], root: Path) -> dict[str, list[str]]:
    """The phases that could find a test, and where: to look through all the rest takes seconds."""
    found: dict[str, list[str]] = {"together": [], "few": [], "alone": []}
    for target in targets:
        path = (root / target.split("::")[0]).resolve()
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            words = str(file.relative_to(root)) if path.is_dir() else target
            for phase in _phases_of(file, root):
                found[phase].append(words)
    if found["together"]:
        found["together"] = list(targets)
    return {phase: words for phase, words in found.items() if words}


def _phases_of(file: Path, root: Path) -> list[str]:
    """As tests/conftest.py sorts them."""
    chaos = root / "tests" / "chaos"
    kills = file.is_relative_to(chaos) and not file.is_relative_to(chaos / "sim")
    marked = [phase for phase in ("few", "alone") if f"mark.{phase}" in file.read_text()]
    return sorted({"few" if kills else "together", *marked})


def side_by_side(phase: str, options: Sequence[str]) -> list[str]:
    if phase == "alone" or "--pdb" in options:  # a debugger needs the terminal
        return []
    count = workers()
    if phase == "few":  # each is many processes by itself
        count = min(count, FEW)
    return ["-n", str(count), "--dist", "loadscope"]  # by tests/conftest.py's own rule


def workers() -> int:
    """Most tests wait, for a lease to run out or for a server: one a core would leave it idle."""
    return int(os.environ.get("TENURE_TEST_WORKERS") or min(3 * (os.cpu_count() or 2), 8))


def compile_tests(targets: Sequence[str], environment: Mapping[str, str]) -> None:
    """On a fresh clone, a process a core: else each process of the first phase compiles all tests.

    pytest rewrites the assertions of a test when it is first collected, and keeps the result.
    """
    kept = Path(environment["PYTHONPYCACHEPREFIX"]) / TESTS.relative_to("/")
    cores = os.cpu_count() or 1
    if kept.exists() or workers() < 2:
        return
    collect = [sys.executable, "-m", "pytest", "--collect-only", "--phase=all", "--quiet"]
    quiet = subprocess.DEVNULL
    started = [
        subprocess.Popen(  # nosec B603 # our own Python
            [*collect, *part], cwd=ROOT, env=environment, stdout=quiet, stderr=quiet
        )
        for part in (targets[at::cores] for at in range(cores))
        if part
    ]
    for process in started:
        process.wait()


def run_phase(
    phase: str, targets: Sequence[str], options: Sequence[str], tally: Path
) -> tuple[int, "Tally"]:
    """The exit code and what was counted, which is written to the file `tally`."""
    tally.touch()
    beside = side_by_side(phase, options)
    command = [sys.executable, "-m", "pytest", "--no-skips", f"--phase={phase}", *beside]
    command += [*options, *targets]
    environment = keeping_bytecode(os.environ) | {"TENURE_TALLY": str(tally)}
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment)  # nosec B603 # our own Python
    return done.returncode, Tally.read(tally)


@contextmanager
def packages_on_their_way(targets: Sequence[str], root: Path) -> Iterator[None]:
    """npm brings what foreign programs need while the first tests run: nobody waits for it then.

    Where it fails, the first test that needs a package tries again and says what is wrong.
    """
    locks = [
        lock for target in targets for lock in sorted((root / target).glob("*/package-lock.json"))
    ]
    if not locks:
        yield
        return
    command = [sys.executable, "-m", "tests.interop.npm", *(str(lock.parent) for lock in locks)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(  # nosec B603 # our own Python
        command, cwd=root, env=keeping_bytecode(os.environ), stdout=quiet, stderr=quiet
    ):
        yield


def keeping_bytecode(environment: Mapping[str, str]) -> dict[str, str]:
    """Hundreds of tests start a Python program, and each would compile all that it imports.

    So bytecode is kept even where the machine says not to, but in .venv and not beside sources.
    """
    kept = {name: word for name, word in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}
    chosen = environment.get("PYTHONPYCACHEPREFIX") or str(ROOT / ".venv" / "bytecode")
    return kept | {"PYTHONPYCACHEPREFIX": chosen}


@dataclass(frozen=True, slots=True)
class Tally:
    """The sum over phases: outcomes by name, tests and seconds by suite."""

    outcomes: Counter[str]
    tests: Counter[str]
    seconds: Counter[str]

    @classmethod
    def read(cls, path: Path) -> "Tally":
        total = cls(Counter(), Counter(), Counter())
        for line in path.read_text().splitlines():
            part = json.loads(line)
            total.add(cls(*(Counter(part[name]) for name in COUNTED)))
        return total

    def add(self, other: "Tally") -> None:
        self.outcomes.update(other.outcomes)
        self.tests.update(other.tests)
        self.seconds.update(other.seconds)


def run_phases(request: Request, folder: Path) -> tuple[list[int], Tally]:
    """The exit codes and what was counted. A failed test is not run again."""
    codes: list[int] = []
    total = Tally(Counter(), Counter(), Counter())
    for phase, targets in phases(request.targets, ROOT).items():
        code, tally = run_phase(phase, targets, request.options, folder / phase)
        codes.append(code)
        total.add(tally)
        if code not in GOES_ON or (code == 1 and request.stops_at_first):
            break
    return codes, total


def closing_lines(tally: Tally, wall_s: float) -> list[str]:
    table = [
        f"{suite:<10} {tally.tests[suite]:>6} {tally.seconds[suite]:>9.1f}"
        for suite in sorted(tally.tests)
    ]
    extra = [
        f"{count} {name}"
        for name, count in sorted(tally.outcomes.items())
        if name not in ("passed", "failed") and count
    ]
    counts = [f"{tally.outcomes['passed']} passed", f"{tally.outcomes['failed']} failed", *extra]
    header = f"{'suite':<10} {'tests':>6} {'seconds':>9}"
    return [header, *table, f"==== {', '.join(counts)} in {wall_s:.2f}s ===="]


def verdict(codes: Sequence[int], request: Request, tally: Tally) -> tuple[int, str]:
    """The exit code, and why where pytest has not already said so."""
    bad = [code for code in codes if code not in (0, NO_TESTS)]
    if bad:
        return bad[0], ""
    if not tally.tests.total():
        return NO_TESTS, "no test ran"
    empty = [suite for suite in request.suites if not tally.tests[suite]]
    if empty and not request.narrowed:
        return NO_TESTS, f"no test ran in: {', '.join(empty)}"
    return 0, ""


def main(words: Sequence[str]) -> int:
    try:
        request = parse(words, TESTS)
    except UnknownSuite as error:
        print(f"bin/test: {error}", file=sys.stderr)
        return USAGE
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, packages_on_their_way(request.targets, ROOT):
        compile_tests(request.targets, keeping_bytecode(os.environ))
        codes, tally = run_phases(request, Path(folder))
    code, why = verdict(codes, request, tally)
    print("", *closing_lines(tally, time.monotonic() - started), sep="\n")
    if why:
        print(f"bin/test: {why}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
