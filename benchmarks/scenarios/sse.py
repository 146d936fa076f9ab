"""Thousands of clients following jobs on one gateway process: how fresh, how much memory each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import uvloop

from harness import processes
from harness.adapter import Peer, PeerError
from harness.gateway import HOST, Gateway, start_gateway
from harness.quantiles import quantile
from harness.scenario import Column, Figures, Goal, Scenario, Stage
from load.sse import Crowd

EVENTS_PER_S = 500
SECONDS = 10.0
CONNECT_PATIENCE_S = 180.0
CATCH_UP_S = 10.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of the gateway, and what Redis uses, in MB."""

    gateway_mb: float
    redis_mb: float


def measure(stage: Stage, name: str) -> Figures:
    """`stage.jobs` clients, one running job each; events spread over all of them."""
    processes.allow_open_files(SCENARIO.clients + 512)
    with stage.peer(name) as peer:
        job_ids = peer.ask("follow", count=stage.jobs)["job_ids"]
        gateway = start_gateway(peer)
        return uvloop.run(_follow(stage, peer, gateway, job_ids))


async def _follow(stage: Stage, peer: Peer, gateway: Gateway, job_ids: list[str]) -> Figures:
    crowd = Crowd()
    before = _memory(stage, gateway)
    connect_s = await _connect(crowd, peer, gateway, job_ids)
    connected = _memory(stage, gateway)
    cpu_before_s = processes.usage(gateway.pid).cpu_s
    stage.server.reset_counters()
    sent = await asyncio.to_thread(peer.ask, "publish", rate=EVENTS_PER_S, seconds=SECONDS)
    await _until_caught_up(crowd, sent["count"])
    cpu_s = processes.usage(gateway.pid).cpu_s - cpu_before_s
    redis_cpu_s = stage.server.spent().cpu_s
    lost = crowd.lost
    crowd.close()
    if not crowd.waits_ms:
        raise PeerError(f"{peer.name}: no event reached any client{peer.tail()}")
    return {
        "connect_s": connect_s,
        "p50_ms": quantile(crowd.waits_ms, 0.50),
        "p99_ms": quantile(crowd.waits_ms, 0.99),
        "max_ms": max(crowd.waits_ms),
        "arrived": 100 * len(crowd.waits_ms) / sent["count"],
        "sent_per_s": sent["count"] / sent["seconds"],
        "lost": lost,
        "client_kb": (connected.gateway_mb - before.gateway_mb) * 1e3 / stage.jobs,
        "redis_client_kb": (connected.redis_mb - before.redis_mb) * 1e3 / stage.jobs,
        "gateway_cpu": 100 * cpu_s / sent["seconds"],
        "redis_cpu": 100 * redis_cpu_s / sent["seconds"],
    }


async def _connect(crowd: Crowd, peer: Peer, gateway: Gateway, job_ids: list[str]) -> float:
    paths = [f"/v1/jobs/{job_id}/events" for job_id in job_ids]
    try:
        took = await crowd.connect(HOST, gateway.port, paths, within_s=CONNECT_PATIENCE_S)
    except TimeoutError:
        raise PeerError(
            f"{peer.name}: only {crowd.greeted} of {len(paths)} clients got their hello within "
            f"{CONNECT_PATIENCE_S:.0f} s{peer.tail()}"
        ) from None
    except OSError as error:
        raise PeerError(
            f"{peer.name}: a client could not connect after {crowd.greeted}: {error}{peer.tail()}"
        ) from None
    if crowd.refused:
        raise PeerError(f"{peer.name}: the gateway refused clients: {crowd.refused}{peer.tail()}")
    return took


async def _until_caught_up(crowd: Crowd, count: int) -> None:
    deadline = asyncio.get_running_loop().time() + CATCH_UP_S
    while len(crowd.waits_ms) < count and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)


def _memory(stage: Stage, gateway: Gateway) -> Memory:
    return Memory(processes.usage(gateway.pid).rss_mb, stage.server.used_memory_mb())


SCENARIO = Scenario(
    name="sse",
    title="Clients of server-sent events on one gateway process",
    about=(
        "Every client follows a running job of its own. 500 events a second are spread over all of "
        "them for 10 seconds; the clock runs from before the event is written until the client has "
        "it. `naive_sse` is the usual gateway: one XREAD connection a client. CPU in percent of "
        "one core while events flow."
    ),
    contenders=("tenure", "naive_sse"),
    jobs=5_000,
    quick_jobs=200,
    headline="p99_ms",
    columns=(
        Column("connect_s", "all connected after s", 1, "low"),
        Column("p50_ms", "p50 ms", 2, "low"),
        Column("p99_ms", "p99 ms", 2, "low"),
        Column("max_ms", "max ms", 1, "low"),
        Column("arrived", "arrived %", 1, "high"),
        Column("sent_per_s", "sent/s"),
        Column("lost", "connections lost", 0, "low"),
        Column("client_kb", "gateway KB/client", 1, "low"),
        Column("redis_client_kb", "Redis KB/client", 1, "low"),
        Column("gateway_cpu", "gateway CPU %", 0, "low"),
        Column("redis_cpu", "Redis CPU %", 0, "low"),
    ),
    measure=measure,
    goals=(
        Goal(
            "every event reaches its client (percent)",
            lambda median: median("tenure", "arrived"),
            least=100,
        ),
        Goal(
            "the p99 of tenure is not above that of one connection a client (ms)",
            lambda median: _gap(median("tenure", "p99_ms"), median("naive_sse", "p99_ms")),
            most=0,
        ),
    ),
    clients=12_000,
)


def _gap(own: float | None, other: float | None) -> float | None:
    return None if own is None or other is None else own - other
