"""Runs the conformance suite against a store that runs, and says which clauses held.

The clauses are those of the reference (contracts/memory/SPEC.md): what every contract means by
submit, claim, extend, settle. What only one contract has is proved by its own tests.

The suite comes with the source, not with the installed package. It works in names of its own
(`suite:…`), beside whatever lies in the store, and leaves those names behind empty or not; a store
in production is not the place for it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import msgspec

from leasehold.cli.config import child_environment
from leasehold.core.errors import UsageError
from leasehold.core.opening import QueueUrl

_CLAUSE = re.compile(r"^- \*\*([A-Z]+-\d+)\*\* (.*)$", re.MULTILINE)
_STORES = {"redis": "LEASEHOLD_REDIS_URL", "postgres": "LEASEHOLD_POSTGRES_URL"}
RESULT = "LEASEHOLD_CHECK_RESULT"


class Ran(msgspec.Struct, frozen=True):
    """One test: the clauses it proves, and whether it passed."""

    name: str
    passed: bool
    clauses: tuple[str, ...] = ()


class Clause(msgspec.Struct, frozen=True):
    """A clause of the reference: `held`, `broken`, or `not asked` of this contract."""

    clause: str
    verdict: str
    text: str
    tests: int = 0
    failed: tuple[str, ...] = ()


def suite_folder() -> Path:
    """Where the suite is; raises if this is an installed package without its source."""
    for root in (Path(__file__).parents[3], Path.cwd()):
        if (root / "tests" / "contract" / "suite").is_dir():
            return root
    raise UsageError("the conformance suite comes with the source: run this in a checkout of it")


def run_suite(url: QueueUrl, *, words: str = "") -> list[Ran]:
    """Run the tests of the suite that concern this contract, on this store."""
    root = suite_folder()
    variable = next((v for name, v in _STORES.items() if url.store.startswith(name)), "")
    environment = child_environment() | ({variable: url.store} if variable else {})
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "ran.json"
        environment[RESULT] = str(result)
        chosen = f"{url.contract} and ({words})" if words else url.contract
        command = [sys.executable, "-m", "pytest", "tests/contract/suite", "-q", "-p"]
        command += ["leasehold.cli.conformance_notes", "-p", "no:cacheprovider", "-k", chosen]
        done = subprocess.run(  # noqa: S603
            command, cwd=root, env={**os.environ, **environment}, stdout=sys.stderr, check=False
        )
        if not result.exists():
            raise UsageError(f"the suite did not run (pytest ended with {done.returncode})")
        return msgspec.json.decode(result.read_bytes(), type=list[Ran])


def judge(ran: list[Ran]) -> list[Clause]:
    """What the tests say of each clause."""
    found = []
    for clause, text in clauses().items():
        mine = [test for test in ran if clause in test.clauses]
        failed = tuple(test.name for test in mine if not test.passed)
        verdict = "broken" if failed else "held" if mine else "not asked"
        found.append(Clause(clause, verdict, text, len(mine), failed))
    return found


def clauses() -> dict[str, str]:
    """The clauses of the reference by number, in the order of its text."""
    spec = files("leasehold.contracts.memory") / "SPEC.md"
    return dict(_CLAUSE.findall(spec.read_text()))
