"""How many no-op jobs a second one worker process completes on SQL queues."""

from __future__ import annotations

import os
from functools import partial

from harness.drain import fill
from harness.postgres import shared_postgres
from harness.scenario import Column, Figures, Goal, Median, Scenario, Stage, ratio

# Of whom a round would last longer than one of all others together.
FEWER = {"procrastinate": 25, "awa": 5}


def measure(stage: Stage, name: str) -> Figures:
    stage = stage.part(FEWER.get(name, 1))
    shared_postgres().fresh()
    os.environ["BENCH_SQLITE_FILE"] = str(stage.folder / "jobs.db")
    with stage.peer(name) as peer:
        filled_s = fill(peer, "noop", stage.jobs)
        shared_postgres().reset()
        worker = peer.start_worker(expect=stage.jobs)
        peer.wait_for(peer.probe, worker, within_s=60 + stage.jobs / 20)
        settled_s = peer.until_settled()
        told = peer.told()
        worker_cpu_s = (told["cpu_last_ns"] - told["cpu_first_ns"]) / 1e9
        return {
            "jobs": stage.jobs,
            "submits_per_s": stage.jobs / filled_s,
            "jobs_per_s": stage.jobs / (settled_s - told["first_ns"] / 1e9),
            "worker_cpu_us": worker_cpu_s / stage.jobs * 1e6,
            "server_cpu_us": shared_postgres().spent_cpu_s() / stage.jobs * 1e6,
        }


_over = partial(ratio, "tenure_inbox", key="jobs_per_s")
_with_events = partial(ratio, "tenure_inbox_events", key="jobs_per_s")


def _submits(median: Median) -> float | None:
    return median("tenure_inbox", "submits_per_s")


def _on_sqlite(median: Median) -> float | None:
    """Told of `synchronous=NORMAL` alone."""
    if os.environ.get("BENCH_SYNCHRONOUS_COMMIT") != "off":
        return None
    return median("tenure_inbox_sqlite_events", "jobs_per_s")


SCENARIO = Scenario(
    name="inbox",
    title="No-op jobs per second on SQL queues, one worker process",
    about=(
        "Jobs are enqueued first; then one worker process with the peer's best setting runs them. "
        "The clock runs from the start of the first handler until the database holds nothing "
        "unfinished. Ours writes an attempt row and two journal rows for every job besides, and "
        "two outbox rows with their journal rows where `events` is in its name; `bare_sql` is the "
        "same statements without a worker: the limit. SQLite runs beside PostgreSQL for "
        "comparison. `BENCH_SYNCHRONOUS_COMMIT=off` is the other setting, and SQLite's NORMAL. The "
        "slowest peers run a part of the jobs, so that a round ends. pgqueuer slows down with the "
        "number of jobs; with this many it is near its best."
    ),
    contenders=(
        *("tenure_inbox", "tenure_inbox_events", "bare_sql"),
        *("tenure_inbox_sqlite", "tenure_inbox_sqlite_events"),
        *("pgqueuer", "awa", "procrastinate"),
    ),
    jobs=20_000,
    quick_jobs=500,
    headline="jobs_per_s",
    columns=(
        Column("jobs_per_s", "jobs/s", better="high"),
        Column("jobs", "jobs"),
        Column("submits_per_s", "submits/s in bulk", better="high"),
        Column("worker_cpu_us", "worker CPU us/job", 1, "low"),
        Column("server_cpu_us", "server CPU us/job", 1, "low"),
    ),
    measure=measure,
    goals=(
        Goal("tenure reaches at least 1.5 times pgqueuer", _over("pgqueuer"), least=1.5),
        Goal("tenure reaches at least 3 times awa", _over("awa"), least=3),
        Goal("tenure reaches at least 20 times procrastinate", _over("procrastinate"), least=20),
        Goal("tenure reaches at least 0.5 of the bare statements", _over("bare_sql"), least=0.5),
        Goal(
            "with outbox rows it reaches at least 1.5 times pgqueuer",
            _with_events("pgqueuer"),
            least=1.5,
        ),
        Goal(
            "with outbox rows it reaches at least 3 times awa",
            _with_events("awa"),
            least=3,
        ),
        Goal(
            "with outbox rows it reaches at least 20 times procrastinate",
            _with_events("procrastinate"),
            least=20,
        ),
        Goal("bulk submits reach at least 50,000 rows/s", _submits, least=50_000),
        Goal("SQLite (NORMAL) with outbox rows: at least 5,000 jobs/s", _on_sqlite, least=5_000),
    ),
)
