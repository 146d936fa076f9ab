"""`tenure check` runs the conformance suite on a live store, `tenure bench` measures this machine.

The clauses of the suite are those of the reference (contracts/memory/SPEC.md): the meaning of
submit, claim, extend and settle in every contract. The suite is part of the source, not of the
installed package. Its names contain the id of its process, and are removed at the end.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import msgspec

from tenure.cli.config import child_environment, load_config
from tenure.cli.console import (
    Exit,
    answer,
    emit,
    emit_text,
    json_option,
    needed_queue_option,
    note,
    paint,
    table,
)
from tenure.core.config import DEFAULT_CONTRACT, why_untrusted
from tenure.core.errors import UsageError
from tenure.core.job import NewJob
from tenure.core.registry import QueueUrl, open_ledger, open_part, open_queue, parse_url
from tenure.store.embedded import embedded_redis
from tenure.store.redis import Redis
from tenure.worker import Job, Settings, Worker, task
from tenure.worker.telemetry import configure_logs

_CLAUSE = re.compile(r"^- \*\*([A-Z]+-\d+)\*\* (.*)$", re.MULTILINE)
_RESULT = "TENURE_CHECK_RESULT"
_ADAPTER = "TENURE_CHECK_ADAPTER"


class CaseResult(msgspec.Struct, frozen=True):
    """One test: whether it passed, and the clauses it proves."""

    name: str
    passed: bool
    clauses: tuple[str, ...] = ()


class _Clause(msgspec.Struct, frozen=True):
    """A clause of the reference: `held`, `broken`, or `not asked` of this contract."""

    clause: str
    verdict: str
    text: str
    tests: int = 0
    failed: tuple[str, ...] = ()


def _suite_folder() -> Path:
    """The checkout that contains the suite; raises if this is an installed package."""
    for root in (Path(__file__).parents[3], Path.cwd()):
        if (root / "tests" / "contract" / "suite").is_dir():
            if why := why_untrusted(root.stat()):
                raise UsageError(f"{root} {why}; run this in a checkout of your own")
            return root
    raise UsageError("the conformance suite comes with the source: run this in a checkout of it")


def _run_suite(url: QueueUrl, *, only: str = "") -> list[CaseResult]:
    """Run the tests of the suite for this contract, on this store."""
    root = _suite_folder()
    environment = child_environment() | _stores_of(url) | {_ADAPTER: _adapter_of(url)}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "ran.json"
        environment[_RESULT] = str(result)
        command = [sys.executable, "-P", "-m", "pytest", "tests/contract/suite", "-q", "-p"]
        command += ["tenure.cli.selftest", "-p", "no:cacheprovider"]
        command += ["-k", only] if only else []
        done = subprocess.Popen(  # nosec B603 # our own pytest
            command, cwd=root, env={**os.environ, **environment}, stdout=sys.stderr
        )
        try:
            done.wait()
        finally:
            asyncio.run(_clean(environment, done.pid))
        if not result.exists():
            raise UsageError(f"the suite did not run (pytest ended with {done.returncode})")
        return msgspec.json.decode(result.read_bytes(), type=list[CaseResult])


async def _clean(stores: Mapping[str, str], pid: int) -> None:
    """Remove everything that the suite with this process id made."""
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
            for name in ("suite", stores[_ADAPTER]):
                await database.script(f"DROP SCHEMA IF EXISTS {name}_{pid} CASCADE")
        finally:
            await database.close()


async def _unlink(redis: Redis, pattern: str) -> None:
    async for found in redis.scan(pattern):
        await redis.pipeline([("UNLINK", key) for key in found])


def _adapter_of(url: QueueUrl) -> str:
    """The suite's name for this contract on this kind of store.

    >>> from tenure.core.registry import parse_url
    >>> _adapter_of(parse_url("plane+postgresql://h/db?redis=redis://h/0"))
    'plane_postgres_redis'
    """
    parts = [url.contract]
    parts += ["postgres"] if url.store.startswith("postgres") else []
    parts += ["redis"] if url.options.get("redis") else []
    return "_".join(parts)


def _stores_of(url: QueueUrl) -> dict[str, str]:
    """The variables with the store; SQLite files of the suite go next to the given one."""
    found = {"TENURE_REDIS_URL": url.options["redis"]} if url.options.get("redis") else {}
    if url.store.startswith(("redis", "valkey", "unix")):
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


async def _check_reachable(url: QueueUrl) -> None:
    """Raise if the store cannot be reached, before any test runs."""
    if url.store.startswith("http"):
        raise UsageError(
            f"{url.safe} is a worker's side; check the queue at its database, by "
            f"{url.contract}+sqlite:// or {url.contract}+postgresql://"
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


_ran: dict[str, CaseResult] = {}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """In pytest, as a plugin: keep the tests of the chosen store."""
    if adapter := os.environ.get(_ADAPTER):
        items[:] = [item for item in items if _adapter_of_test(item) == adapter]
        for item in items:
            clauses = [str(arg) for mark in item.iter_markers("clause") for arg in mark.args]
            _ran[item.nodeid] = CaseResult(item.nodeid, True, tuple(clauses))


def _adapter_of_test(item: Any) -> str:
    spec = getattr(item, "callspec", None)
    return str(spec.params.get("contract", "")) if spec else ""


def pytest_runtest_logreport(report: Any) -> None:
    """In pytest: a test that does not pass in one of its phases has failed."""
    if report.outcome != "passed" and report.nodeid in _ran:
        _ran[report.nodeid] = msgspec.structs.replace(_ran[report.nodeid], passed=False)


def pytest_sessionfinish() -> None:
    """In pytest: write the results for the command."""
    if _RESULT in os.environ:
        Path(os.environ[_RESULT]).write_bytes(msgspec.json.encode(list(_ran.values())))


def clause_verdicts(ran: list[CaseResult]) -> list[_Clause]:
    """The verdict of each clause, by its tests."""
    found = []
    for clause, text in _clauses().items():
        tests = [test for test in ran if clause in test.clauses]
        failed = tuple(test.name for test in tests if not test.passed)
        verdict = "broken" if failed else "held" if tests else "not asked"
        found.append(_Clause(clause, verdict, text, len(tests), failed))
    return found


def _clauses() -> dict[str, str]:
    """The clauses of the reference by number, in their order."""
    spec = files("tenure.contracts.memory") / "SPEC.md"
    return dict(_CLAUSE.findall(spec.read_text()))


_COLOURS = {"held": "green", "broken": "red", "not asked": "dim"}


@click.command("check")
@needed_queue_option
@click.option("--only", default="", help="Only tests whose names match, as pytest's -k.")
@json_option
def check_command(queue_url: str, only: str, as_json: bool) -> int:
    """Run the conformance suite on a live store, and show which clauses hold.

    The clauses define submit, claim, extend and settle for every contract.

    The suite uses its own names and removes them at the end, but it loads the store: choose one for
    tests. The suite is part of the source, so this runs in a checkout. Exit code 8 if a clause is
    broken.

    \b
    tenure check --queue streams+redis://127.0.0.1:6379/15
    """
    parsed = parse_url(load_config().text("queue_url", queue_url))
    asyncio.run(_check_reachable(parsed))
    ran = _run_suite(parsed, only=only)
    clauses = clause_verdicts(ran)
    if as_json:
        for clause in clauses:
            emit(clause)
    else:
        emit_text(table(["CLAUSE", "", "TESTS", "SAYS"], map(_clause_row, clauses)))
        tally = Counter(clause.verdict for clause in clauses)
        failed = sum(not test.passed for test in ran)
        summary = ", ".join(f"{count} {verdict}" for verdict, count in tally.items())
        emit_text(f"{len(ran)} tests, {failed} failed; clauses: {summary}")
    return Exit.PROBLEMS if any(not test.passed for test in ran) else Exit.OK


def _clause_row(clause: _Clause) -> list[str]:
    verdict = paint(clause.verdict, _COLOURS[clause.verdict])
    return [clause.clause, verdict, str(clause.tests or "-"), clause.text[:90]]


_BULK = 500
_PROBES_PER_S = 100


@click.command("bench")
@click.option("--jobs", type=click.IntRange(100, 5_000_000), default=20_000, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.5, 600), default=3.0, help="For the latency.")
@click.option("--fsync", type=click.Choice(["everysec", "always", "no"]), default="everysec")
@json_option
def bench_command(jobs: int, seconds: float, fsync: str, as_json: bool) -> None:
    """Enqueue jobs in bulk, run them as no-ops, then measure the time from submit to start.

    The figures contain neither gateway nor network; worker and client share one process.

    \b
    tenure bench
    tenure bench --json
    """
    import uvloop

    configure_logs(level="error", json=False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(_bench(jobs, seconds, fsync))
    answer(as_json, figures, _figures_text(figures))


async def _bench(jobs: int, seconds: float, fsync: str) -> dict[str, Any]:
    note("starting a private store")
    async with embedded_redis(appendfsync=fsync, with_password=True) as server:
        url = f"{DEFAULT_CONTRACT}+{server.url}?max_depth=0"
        note(f"enqueue {jobs} jobs, {_BULK} a call")
        enqueue_s = await _enqueue(url, jobs)
        note("run them")
        run_s, cpu_s = await _run_all(url)
        note(f"submit {_PROBES_PER_S} jobs a second for {seconds:g} s")
        waits_ms = await _latency(url, seconds)
    return {
        "jobs": jobs,
        "appendfsync": fsync,
        "enqueue_per_s": round(jobs / enqueue_s),
        "run_per_s": round(jobs / run_s),
        "worker_cpu_us_per_job": round(cpu_s / jobs * 1e6, 1),
        "start_latency_ms": {"p50": _quantile(waits_ms, 0.5), "p99": _quantile(waits_ms, 0.99)},
        "probes": len(waits_ms),
    }


async def _enqueue(url: str, jobs: int) -> float:
    queue = open_queue(url, worker_id="bench")
    new = [NewJob(task="noop", payload=b"{}") for _ in range(_BULK)]
    begin = time.perf_counter()
    for start in range(0, jobs, _BULK):
        await queue.submit(new[: min(_BULK, jobs - start)])
    took_s = time.perf_counter() - begin
    await queue.close()
    return took_s


async def _run_all(url: str) -> tuple[float, float]:
    """Seconds and CPU seconds of this process until the queue is empty."""

    async def noop(job: Job) -> None:
        return None

    settings = Settings(burst=True, concurrency=_BULK)
    worker = Worker([task("noop")(noop)], queues=[url], settings=settings)
    begin, cpu_s = time.perf_counter(), time.process_time()
    await worker.serve()
    return time.perf_counter() - begin, time.process_time() - cpu_s


async def _latency(url: str, seconds: float) -> list[float]:
    """Milliseconds from the call of submit to the first line of the handler."""
    submitted: dict[str, float] = {}
    waits_ms: list[float] = []
    count = round(seconds * _PROBES_PER_S)
    all_started = asyncio.Event()

    async def started(job: Job) -> None:
        waits_ms.append((time.perf_counter() - submitted.pop(job.id)) * 1000)
        if len(waits_ms) == count:
            all_started.set()

    worker = Worker([task("noop")(started)], queues=[url])
    serving = asyncio.create_task(worker.serve())
    queue = open_queue(url, worker_id="bench")
    begin = time.perf_counter()
    for number in range(count):
        await asyncio.sleep(max(0.0, begin + number / _PROBES_PER_S - time.perf_counter()))
        job_id = f"probe-{number}"
        submitted[job_id] = time.perf_counter()
        await queue.submit([NewJob(task="noop", payload=b"{}", job_id=job_id)])
    await asyncio.wait_for(all_started.wait(), 30)
    worker.stop()
    await serving
    await queue.close()
    return waits_ms


def _quantile(values: Sequence[float], share: float) -> float:
    """The quantile `share` of the values, by nearest rank.

    >>> _quantile([5.0, 1.0, 3.0], 0.5), _quantile([1.0, 2.0], 0.99)
    (3.0, 2.0)
    """
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


def _figures_text(figures: dict[str, Any]) -> str:
    latency, cpu_us = figures["start_latency_ms"], figures["worker_cpu_us_per_job"]
    probes = f"{figures['probes']} jobs at {_PROBES_PER_S} a second"
    lines = [
        f"enqueue     {figures['enqueue_per_s']:>9,} jobs/s   (bulk of {_BULK})",
        f"run         {figures['run_per_s']:>9,} jobs/s   ({cpu_us} us of CPU a job)",
        f"start p50   {latency['p50']:>9} ms",
        f"start p99   {latency['p99']:>9} ms       ({probes})",
    ]
    return "\n".join(lines)
