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

OURS = ("leasehold_inbox_events", "leasehold_inbox_sqlite_events")
EVENTS_PER_JOB = 2
SECRETS = "* = whsec_bGVhc2Vob2xkIG1lYXN1cmVzIGl0cyB3ZWJob29rcw=="
RECEIVER = Path(__file__).resolve().parents[1] / "load" / "receiver.py"


def measure(stage: Stage, name: str) -> Figures:
    """The events of so many jobs wait in the outbox; then a worker is started as users do."""
    folder = stage.folder / "receiver"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    receiver = processes.start([sys.executable, str(RECEIVER), str(folder)])
    try:
        if not until((folder / "port").exists, within_s=20):
            raise PeerError("the receiver of webhooks did not start")
        return _delivered(stage, name, folder)
    finally:
        processes.kill(receiver)


def _delivered(stage: Stage, name: str, folder: Path) -> Figures:
    host = f"127.0.0.1:{(folder / 'port').read_text()}"
    os.environ["BENCH_RECEIVER"] = f"http://{host}/hook"
    os.environ["BENCH_SQLITE_FILE"] = str(stage.folder / "jobs.db")
    shared_postgres().fresh()
    with stage.peer(name) as peer:
        peer.ask("beside", within_s=300, kind="finished", rows=stage.jobs)
        how = peer.ask("deliverer")
        allowed = {"LEASEHOLD_EGRESS_ALLOW": host, "LEASEHOLD_WEBHOOKS_SECRETS": SECRETS}
        worker = peer.start(how["argv"], {**how["env"], **allowed})
        wanted = stage.jobs * EVENTS_PER_JOB
        if not until(lambda: _told(folder).get("count", 0) >= wanted, within_s=stage.patience_s):
            raise PeerError(f"{_told(folder)} of {wanted} events were delivered{peer.tail()}")
        told = _told(folder)
        cpu_s = processes.usage(worker.pid).cpu_s
    seconds = (told["last_ns"] - told["first_ns"]) / 1e9
    return {
        "deliveries_per_s": told["count"] / seconds,
        "late": told["late"],
        "unsigned": told["unsigned"],
        "twice": told["count"] - wanted,
        "worker_cpu_us": cpu_s / told["count"] * 1e6,
    }


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
        "process delivers them to a receiver on loopback; the clock runs from the first delivery "
        "to the last. Late are those that came after a later one of their job."
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
                f"{name} keeps the order of every job",
                lambda median, name=name: median(name, "late"),  # type: ignore[misc]
                most=0,
            )
            for name in OURS
        ),
    ),
)
