"""Runs the conformance suite over every folder of `contracts/`, and judges every history.

A test of the suite asks for `stage`: one isolated queue of one contract. When the test is over, its
whole journal and the store itself go through the history checker, so that every test of the suite
also proves that the chain is unbroken. `needs("priority")` marks a test that makes sense only where
the contract can do that; what a contract cannot do is listed at the end of the run, not skipped.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection
from typing import Any

import msgspec
import pytest

from tenure.core.job import JobEvent
from tenure.core.journal import JournalEvent
from tenure.core.registry import contract_names
from tenure.core.seam import Query, is_full
from tests.chaos.verdict import Snapshot, check
from tests.contract.adapters import CAPABILITIES, Adapter, Servers, Stage, adapters

_KNOWN = adapters(Servers())
_NAMES = sorted({*contract_names(), *_KNOWN})
EVENTS_READ_OF_JOBS = 100
UNHURRIED_MS = 10_000


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(capability): runs only on contracts that can do this")
    config.addinivalue_line("markers", "options(**options): options of the queue URL")
    config.addinivalue_line(
        "markers", "leases_run_out: lets leases run out, so they are as short as the store allows"
    )
    config.addinivalue_line(
        "markers", "raw_writes: writes past the queue, so that its history is not the whole story"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "stage" not in metafunc.fixturenames:
        return
    needed = {name for mark in metafunc.definition.iter_markers("needs") for name in mark.args}
    assert needed <= CAPABILITIES.keys(), f"unknown capability in {metafunc.definition.nodeid}"
    module = metafunc.module.__name__.rpartition(".")[2]
    names = [
        name
        for name in _NAMES
        if name not in _KNOWN
        or (not needed & _KNOWN[name].cannot.keys() and module in _modules(_KNOWN[name], module))
    ]
    metafunc.parametrize("contract", names)


def _modules(adapter: Adapter, module: str) -> Collection[str]:
    """Which modules of the suite are run over an adapter: all, unless it names some."""
    return getattr(adapter, "modules", (module,))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran = {
        report.nodeid.partition("[")[2].rstrip("]").split("-")[0]
        for report in terminalreporter.stats.get("passed", [])
        if "contract/suite/" in report.nodeid
    }
    lacks = [
        (name, *lack) for name in _KNOWN if name in ran for lack in _KNOWN[name].cannot.items()
    ]
    if lacks:
        terminalreporter.section("what a contract cannot do by its own text")
        for name, capability, reason in lacks:
            terminalreporter.write_line(f"{name} has no {capability}: {reason}")


@pytest.fixture
async def stage(
    contract: str, servers: Servers, request: pytest.FixtureRequest
) -> AsyncGenerator[Stage]:
    known = adapters(servers)
    if contract not in known:
        pytest.fail(f"contracts/{contract} has no adapter in tests/contract/adapters.py")
    marks = list(request.node.iter_markers("options"))[::-1]
    options = {name: value for mark in marks for name, value in mark.kwargs.items()}
    if request.node.get_closest_marker("leases_run_out") is None:
        # A machine that stands still for a moment must not take a lease away.
        options.setdefault("lease_ms", UNHURRIED_MS)
    stage = await known[contract].open(**options)
    try:
        yield stage
        await judge(stage)
    finally:
        await stage.close()


async def judge(stage: Stage) -> None:
    """The history of the test that just ended must be sound, and agree with the store."""
    events = await history(stage)
    if line_of := getattr(stage, "line_of", None):
        events = [msgspec.structs.replace(each, queue=line_of(each.job_id)) for each in events]
    page = await stage.ledger.find(Query(limit=500))
    records = list(page.jobs)
    while page.after:
        page = await stage.ledger.find(Query(limit=500, after=page.after))
        records += page.jobs
    some = records[:: len(records) // EVENTS_READ_OF_JOBS + 1]
    told = {record.job_id: await told_of(stage, record.job_id) for record in some}
    verdict = check(events, snapshot=Snapshot(records=records, events=told), quiesced=False)
    assert verdict.ok, str(verdict)


async def told_of(stage: Stage, job_id: str) -> list[JobEvent]:
    """All events of a job."""
    told: list[JobEvent] = []
    while page := await stage.ledger.events(job_id, after=told[-1].event_id if told else ""):
        told += page
        if not is_full(page, 1000):
            break
    return told


async def history(stage: Stage) -> list[JournalEvent]:
    """The whole journal."""
    events: list[JournalEvent] = []
    while more := await stage.journal.read(after=events[-1].seq if events else ""):
        events += more
    return events


@pytest.fixture
def journal_of(stage: Stage) -> Callable[[str], Any]:
    """The events of one job so far."""

    async def read(job_id: str) -> list[JournalEvent]:
        return [event for event in await history(stage) if event.job_id == job_id]

    return read
