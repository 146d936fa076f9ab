"""A control plane over HTTP beside queues whose workers sit in the database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import uvloop

from harness import processes
from harness.adapter import Peer, PeerError
from harness.drain import fill
from harness.gateway import HOST, Gateway, start_gateway
from harness.postgres import shared_postgres
from harness.quantiles import quantile
from harness.scenario import Column, Figures, Goal, Scenario, Stage
from load.plane import Workers, pairs

OWN = "tenure_plane"
# A slow peer gets fewer jobs, so that a round stays short; its rate does not depend on how many.
FEWER = {"oban": 2, "procrastinate": 8}
SINGLE_WORKERS = 64
IDLE_WORKERS = 2_000
IDLE_LOOK_S = 0.5
IDLE_SHARE_MAX = 0.05
IDLE_WITHIN_S = 60.0
WAKES_PER_S = 50
WAKE_SECONDS = 6.0

Median = Callable[[str, str], float | None]


def measure(stage: Stage, name: str) -> Figures:
    processes.allow_open_files(IDLE_WORKERS + 1_024)
    shared_postgres().fresh()
    jobs = max(1, stage.jobs // FEWER.get(name, 1))
    with stage.peer(name) as peer:
        gateway = start_gateway(peer) if name == OWN else None
        figures = _drained(peer, jobs, gateway)
        if gateway is not None:
            figures |= uvloop.run(_single(peer, gateway, jobs // 2))
            figures |= uvloop.run(_idle(peer, gateway, min(IDLE_WORKERS, stage.jobs)))
        return figures


def _drained(peer: Peer, jobs: int, gateway: Gateway | None) -> dict[str, float | None]:
    """One worker process empties a filled queue."""
    fill(peer, "noop", jobs)
    shared_postgres().reset()
    plane_cpu_s = _cpu_s(gateway)
    worker = peer.start_worker(expect=jobs, env=gateway.told["worker_env"] if gateway else {})
    peer.wait_for(peer.probe, worker, within_s=60 + jobs / 20)
    settled_s = peer.until_settled()
    told = peer.told()
    worker_cpu_s = (told["cpu_last_ns"] - told["cpu_first_ns"]) / 1e9
    server_cpu_s, plane_cpu_s = shared_postgres().spent_cpu_s(), _cpu_s(gateway) - plane_cpu_s
    processes.kill(worker)
    return {
        "jobs_per_s": jobs / (settled_s - told["first_ns"] / 1e9),
        "worker_cpu_us": worker_cpu_s / jobs * 1e6,
        "plane_cpu_us": plane_cpu_s / jobs * 1e6 if gateway else None,
        "server_cpu_us": server_cpu_s / jobs * 1e6,
    }


async def _single(peer: Peer, gateway: Gateway, jobs: int) -> dict[str, float | None]:
    """The contract's own calls: every job by one claim and one complete."""
    await asyncio.to_thread(fill, peer, "noop", jobs)
    workers = min(SINGLE_WORKERS, jobs)
    took_s = await pairs(f"{HOST}:{gateway.port}", count=jobs, workers=workers)
    return {"pairs_per_s": jobs / took_s}


async def _idle(peer: Peer, gateway: Gateway, count: int) -> dict[str, float | None]:
    """Thousands wait; how much each one costs, and how soon one of them has a job."""
    waits_ms: list[float] = []

    def taken(lease: Any) -> None:
        waits_ms.append((time.monotonic_ns() - lease["payload"]["argument"]) / 1e6)

    before_mb = processes.usage(gateway.pid).rss_mb
    crowd = Workers(f"{HOST}:{gateway.port}", wait_ms=60_000, taken=taken)
    await crowd.connect(count)
    await _settled(peer, gateway)
    idle_mb, cpu_s = processes.usage(gateway.pid).rss_mb, _cpu_s(gateway)
    sent = await asyncio.to_thread(peer.ask, "pace", rate=WAKES_PER_S, seconds=WAKE_SECONDS)
    deadline = time.monotonic() + 10
    while len(waits_ms) < sent["count"] and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    crowd.close()
    if crowd.refused or len(waits_ms) != sent["count"]:
        what = crowd.refused or f"{len(waits_ms)} of {sent['count']} jobs came"
        raise PeerError(f"{peer.name}: {what}{peer.tail()}")
    return {
        "idle_kb": (idle_mb - before_mb) * 1e3 / count,
        "wake_p50_ms": quantile(waits_ms, 0.50),
        "wake_p99_ms": quantile(waits_ms, 0.99),
        "wake_cpu": 100 * (_cpu_s(gateway) - cpu_s) / sent["seconds"],
    }


async def _settled(peer: Peer, gateway: Gateway) -> None:
    """Until the plane has nothing left to do: by then it has taken in everybody's claim."""
    deadline = time.monotonic() + IDLE_WITHIN_S
    used_s = _cpu_s(gateway)
    while time.monotonic() < deadline:
        await asyncio.sleep(IDLE_LOOK_S)
        used_s, before_s = _cpu_s(gateway), used_s
        if used_s - before_s <= IDLE_SHARE_MAX * IDLE_LOOK_S:
            return
    raise PeerError(f"{peer.name}: not at rest {IDLE_WITHIN_S:.0f} s after the last claim")


def _cpu_s(gateway: Gateway | None) -> float:
    return processes.usage(gateway.pid).cpu_s if gateway else 0.0


def _over(other: str) -> Callable[[Median], float | None]:
    def ratio(median: Median) -> float | None:
        own, theirs = median(OWN, "jobs_per_s"), median(other, "jobs_per_s")
        return None if own is None or not theirs else own / theirs

    return ratio


SCENARIO = Scenario(
    name="plane",
    title="No-op jobs per second through a control plane over HTTP",
    about=(
        "Ours: one plane process, one worker process that reaches it by HTTP alone, and PostgreSQL "
        "with synchronous_commit on; the peers' workers speak to the same PostgreSQL themselves. "
        "Jobs are enqueued first; the clock runs from the first handler's start until the database "
        "holds nothing unfinished. Pairs are the contract's single calls: 64 workers, one claim "
        "and one complete for each job. Then 2,000 workers wait on one plane, 50 jobs a second "
        "are posted, and the clock runs from before the post until a worker has the job."
    ),
    contenders=(OWN, "oban", "procrastinate"),
    jobs=16_000,
    quick_jobs=400,
    headline="jobs_per_s",
    columns=(
        Column("jobs_per_s", "jobs/s", better="high"),
        Column("worker_cpu_us", "worker CPU us/job", 1, "low"),
        Column("plane_cpu_us", "plane CPU us/job", 1, "low"),
        Column("server_cpu_us", "server CPU us/job", 1, "low"),
        Column("pairs_per_s", "single pairs/s", better="high"),
        Column("idle_kb", "plane KB/idle worker", 1, "low"),
        Column("wake_p50_ms", "wake-up p50 ms", 2, "low"),
        Column("wake_p99_ms", "wake-up p99 ms", 2, "low"),
        Column("wake_cpu", "plane CPU % while waking", 0, "low"),
    ),
    measure=measure,
    goals=(
        Goal("at least 5,000 jobs/s", lambda median: median(OWN, "jobs_per_s"), least=5_000),
        Goal("at least 1,500 pairs/s", lambda median: median(OWN, "pairs_per_s"), least=1_500),
        Goal("at least 3 times oban", _over("oban"), least=3),
        Goal("at least 3 times procrastinate", _over("procrastinate"), least=3),
        Goal(
            "a job wakes one of the idle workers in 50 ms (p99)",
            lambda median: median(OWN, "wake_p99_ms"),
            most=50,
        ),
    ),
)
