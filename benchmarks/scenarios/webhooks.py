"""How many signed webhooks a second one worker process delivers."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from harness import processes
from harness.adapter import PeerError
from harness.postgres import shared_postgres
from harness.scenario import Column, Figures, Goal, Scenario, Stage
from harness.waiting import until

OURS = ("tenure_inbox_events", "tenure_inbox_sqlite_events")
EVENTS_PER_JOB = 2
CONCURRENCY = 50
"""Deliveries at once: two claims of 25, the most that one takes. A worker's own default is 5."""
KEY = "dGVudXJlIG1lYXN1cmVzIGl0cyBvd24gd2ViaG9va3M="
RECEIVER = Path(__file__).resolve().parents[1] / "load" / "receiver.py"


def measure(stage: Stage, name: str) -> Figures:
    """The events of so many jobs wait in the outbox; then a worker is started as users do."""
    folder = stage.folder / "receiver"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    receiver = processes.start([sys.executable, str(RECEIVER), str(folder), KEY])
    try:
        if not until((folder / "port").exists, within_s=20):
            raise PeerError("the receiver of webhooks did not start")
        return _delivered(stage, name, folder, receiver.pid)
    finally:
        processes.kill(receiver)


def _delivered(stage: Stage, name: str, folder: Path, receiver: int) -> Figures:
    host = f"127.0.0.1:{(folder / 'port').read_text()}"
    os.environ["BENCH_RECEIVER"] = f"http://{host}/hook"
    os.environ["BENCH_SQLITE_FILE"] = str(stage.folder / "jobs.db")
    shared_postgres().fresh()
    with stage.peer(name) as peer:
        peer.ask("beside", within_s=300, kind="finished", rows=stage.jobs)
        how = peer.ask("deliverer", concurrency=CONCURRENCY)
        allowed = {"TENURE_EGRESS_ALLOW": host, "TENURE_WEBHOOKS_SECRETS": f"* = whsec_{KEY}"}
        worker = peer.start(how["argv"], {**how["env"], **allowed})
        stage.prepared["worker"] = " ".join([*how["argv"][:-1], "URL"])
        until((folder / "first").exists, within_s=stage.patience_s)
        shared_postgres().reset()
        cpu_before_s = _cpu_s(worker.pid, receiver)
        wanted = stage.jobs * EVENTS_PER_JOB
        if not until(lambda: _told(folder).get("count", 0) >= wanted, within_s=stage.patience_s):
            raise PeerError(f"{_told(folder)} of {wanted} events were delivered{peer.tail()}")
        worker_s, receiver_s = (
            after - before
            for after, before in zip(_cpu_s(worker.pid, receiver), cpu_before_s, strict=True)
        )
        store_s = None if "sqlite" in name else shared_postgres().spent_cpu_s()
    told = _told(folder)
    seconds = (told["last_ns"] - told["first_ns"]) / 1e9
    return {
        "deliveries_per_s": told["count"] / seconds,
        "late": told["late"],
        "unsigned": told["unsigned"],
        "twice": told["twice"],
        "worker_cpu_us": worker_s / told["count"] * 1e6,
        "store_cpu_us": None if store_s is None else store_s / told["count"] * 1e6,
        "receiver_cpu_us": receiver_s / told["count"] * 1e6,
    }


def _cpu_s(*pids: int) -> list[float]:
    return [processes.usage(pid).cpu_s for pid in pids]


def _told(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if (folder / "told").exists():
        told = json.loads((folder / "told").read_text())
    return told


SCENARIO = Scenario(
    name="webhooks",
    title="Signed webhooks per second, one worker process",
    about=(
        "Jobs with an address have run, and two events of each wait in the outbox. Then one worker "
        "process (50 deliveries at once; the default is 5) sends them to a receiver on loopback, "
        "which checks every signature; the clock runs from the first delivery to the last. Late "
        "are those that came after a later one of their job. SQLite works inside the worker."
    ),
    contenders=OURS,
    jobs=5_000,
    quick_jobs=200,
    headline="deliveries_per_s",
    columns=(
        Column("deliveries_per_s", "deliveries/s", better="high"),
        Column("late", "late", better="low"),
        Column("unsigned", "unsigned", better="low"),
        Column("twice", "twice", better="low"),
        Column("worker_cpu_us", "worker CPU us/delivery", better="low"),
        Column("store_cpu_us", "store CPU us/delivery", better="low"),
        Column("receiver_cpu_us", "receiver CPU us/delivery", better="low"),
    ),
    measure=measure,
    goals=(
        *(
            Goal(
                f"{name} delivers at least 1,000 a second",
                lambda median, name=name: median(name, "deliveries_per_s"),  # type: ignore[misc]
                least=1_000,
            )
            for name in OURS
        ),
        *(
            Goal(
                f"{name}: {claim}",
                lambda median, name=name, key=key: median(name, key),  # type: ignore[misc]
                most=0,
            )
            for name in OURS
            for key, claim in (
                ("late", "the order of every job is kept"),
                ("unsigned", "every signature is right"),
                ("twice", "no event comes twice"),
            )
        ),
    ),
)
