"""Runs the conformance suite against a store that runs, and says which clauses held.

The clauses are those of the reference (contracts/memory/SPEC.md): what every contract means by
submit, claim, extend, settle. What only one contract has is proved by its own tests.

The suite comes with the source, not with the installed package. It works in names of its own
(`suite:…`), which carry the number of its process, beside whatever lies in the store; at the end
they are removed. It works hard: a store in production is not the place for it.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import msgspec

from tenure.cli.config import child_environment
from tenure.core.errors import UsageError
from tenure.core.registry import QueueUrl, open_ledger, open_part
from tenure.store.private import why_untrusted
from tenure.store.redis import Redis

_CLAUSE = re.compile(r"^- \*\*([A-Z]+-\d+)\*\* (.*)$", re.MULTILINE)
RESULT = "TENURE_CHECK_RESULT"
ADAPTER = "TENURE_CHECK_ADAPTER"


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
            if why := why_untrusted(root.stat()):
                raise UsageError(f"{root} {why}; run this in a checkout of your own")
            return root
    raise UsageError("the conformance suite comes with the source: run this in a checkout of it")


def run_suite(url: QueueUrl, *, words: str = "") -> list[Ran]:
    """Run the tests of the suite that concern this contract, on this store."""
    root = suite_folder()
    environment = child_environment() | stores_of(url) | {ADAPTER: adapter_of(url)}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "ran.json"
        environment[RESULT] = str(result)
        command = [sys.executable, "-P", "-m", "pytest", "tests/contract/suite", "-q", "-p"]
        command += ["tenure.cli.conformance_notes", "-p", "no:cacheprovider"]
        command += ["-k", words] if words else []
        done = subprocess.Popen(  # nosec B603 # our own pytest
            command, cwd=root, env={**os.environ, **environment}, stdout=sys.stderr
        )
        try:
            done.wait()
        finally:
            asyncio.run(_clean(environment, done.pid))
        if not result.exists():
            raise UsageError(f"the suite did not run (pytest ended with {done.returncode})")
        return msgspec.json.decode(result.read_bytes(), type=list[Ran])


async def _clean(stores: Mapping[str, str], pid: int) -> None:
    """Remove what the suite of this process made; its names carry the number of the process."""
    if url := stores.get("TENURE_REDIS_URL"):
        redis = Redis(url)
        try:
            for pattern in (f"*suite:{pid}:*", f"*suite-{pid}-*", f"*suite-pg-{pid}:*"):
                await _unlink(redis, pattern)
        finally:
            await redis.close()
    if url := stores.get("TENURE_POSTGRES_URL"):
        from tenure.store.postgres import Postgres

        database = Postgres(url, schema="public", pinned=False)
        try:
            for name in ("suite", "plane_postgres", "plane_postgres_redis"):
                await database.script(f"DROP SCHEMA IF EXISTS {name}_{pid} CASCADE")
        finally:
            await database.close()


async def _unlink(redis: Redis, pattern: str) -> None:
    cursor = b"0"
    while True:
        cursor, found = await redis.call("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        if found:
            await redis.call("UNLINK", *found)
        if cursor == b"0":
            return


def adapter_of(url: QueueUrl) -> str:
    """What the suite calls this contract on this kind of store.

    >>> from tenure.core.registry import parse_url
    >>> adapter_of(parse_url("plane+postgresql://h/db?redis=redis://h/0"))
    'plane_postgres_redis'
    """
    parts = [url.contract]
    parts += ["postgres"] if url.store.startswith("postgres") else []
    parts += ["redis"] if url.options.get("redis") else []
    return "_".join(parts)


def stores_of(url: QueueUrl) -> dict[str, str]:
    """Where the suite finds the store; files of its own lie beside the one that is named."""
    found = {"TENURE_REDIS_URL": url.options["redis"]} if url.options.get("redis") else {}
    if url.store.startswith(("redis", "unix")):
        found["TENURE_REDIS_URL"] = url.store
    elif url.store.startswith("postgres"):
        found["TENURE_POSTGRES_URL"] = open_part(url.text, "database").database.url
    elif url.store.startswith(("sqlite", "libsql")):
        from tenure.store.sqlite import file_of

        folder = file_of(url.store).parent
        if not folder.is_dir():
            raise UsageError(f"{url.safe}: there is no folder {folder}")
        found["TMPDIR"] = str(folder)
    return found


async def check_reachable(url: QueueUrl) -> None:
    """Raise what stands between us and the store, before any test is run against nothing."""
    if url.store.startswith("http"):
        raise UsageError(
            f"{url.safe} is a worker's side; check the plane at its database, by plane+sqlite:// "
            "or plane+postgresql://"
        )
    if url.store.startswith(("sqlite", "libsql")):
        return  # the suite makes files of its own
    ledger = open_ledger(url.text)
    try:
        await ledger.counts()
    except UsageError:  # a server that answers; the suite makes a schema of its own
        pass
    finally:
        await ledger.close()


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
    spec = files("tenure.contracts.memory") / "SPEC.md"
    return dict(_CLAUSE.findall(spec.read_text()))
