"""How many jobs a second one producer process puts in: through the library, and through HTTP."""

from __future__ import annotations

import uvloop

from harness import processes
from harness.adapter import Peer, PeerError
from harness.gateway import HOST, Gateway, start_gateway
from harness.quantiles import quantile
from harness.scenario import QUEUES, Column, Figures, Scenario, Stage
from load.http import LoadResult, post

MODES = ("single", "concurrent", "bulk")
HTTP_CONNECTIONS = 64


def measure(stage: Stage, name: str) -> Figures:
    figures: dict[str, float | None] = {}
    with stage.peer(name) as peer:
        rates = {}
        for mode in MODES:
            if mode not in peer.prepared.modes:
                continue
            stage.server.fresh()
            took = peer.ask("enqueue", task="noop", count=stage.jobs, mode=mode)
            rates[f"{mode}_per_s"] = stage.jobs / took["seconds"]
            # The last mode there is costs least: these two end up being about that one.
            figures["client_cpu_us"] = took["cpu_seconds"] / stage.jobs * 1e6
            figures["redis_cpu_us"] = stage.server.spent().cpu_s / stage.jobs * 1e6
        figures.update(rates, best_per_s=max(rates.values()))
        if name == "tenure":
            figures.update(_through_http(stage, peer))
    return figures


def _through_http(stage: Stage, peer: Peer) -> Figures:
    gateway = start_gateway(peer)
    stage.server.fresh()
    _post(peer, gateway, count=64, connections=8)  # warm up
    before = processes.usage(gateway.pid)
    result = _post(peer, gateway, count=stage.jobs, connections=HTTP_CONNECTIONS)
    after = processes.usage(gateway.pid)
    return {
        "http_per_s": stage.jobs / result.seconds,
        "http_p50_ms": quantile(result.latencies_ms, 0.50),
        "http_p99_ms": quantile(result.latencies_ms, 0.99),
        "http_cpu_us": (after.cpu_s - before.cpu_s) / stage.jobs * 1e6,
    }


def _post(peer: Peer, gateway: Gateway, *, count: int, connections: int) -> LoadResult:
    body = gateway.told["body"].encode()
    load = post(HOST, gateway.port, "/v1/jobs", body, count=count, connections=connections)
    try:
        result = uvloop.run(load)
    except (OSError, TimeoutError) as error:
        raise PeerError(f"{peer.name}: its gateway broke: {error!r}{peer.tail()}") from None
    wrong = {status: answers for status, answers in result.statuses.items() if status >= 300}
    if wrong:
        raise PeerError(f"{peer.name}: the gateway answered {wrong} under load{peer.tail()}")
    return result


SCENARIO = Scenario(
    name="enqueue",
    title="Jobs put in per second, one producer process",
    about=(
        "`single`: one call after the other. `concurrent`: 50 calls in flight, for async "
        "libraries. `bulk`: the library's own batch call, where it has one. CPU per job is that of "
        "the last of these. `HTTP`: POST /v1/jobs to one gateway process over 64 keep-alive "
        "connections with one request each in flight, every effect of the contract included."
    ),
    contenders=QUEUES,
    jobs=10_000,
    quick_jobs=500,
    headline="best_per_s",
    columns=(
        Column("single_per_s", "single/s", better="high"),
        Column("concurrent_per_s", "concurrent/s", better="high"),
        Column("bulk_per_s", "bulk/s", better="high"),
        Column("best_per_s", "best of them/s", better="high"),
        Column("client_cpu_us", "client CPU us/job", 1, "low"),
        Column("redis_cpu_us", "Redis CPU us/job", 1, "low"),
        Column("http_per_s", "HTTP/s", better="high"),
        Column("http_p50_ms", "HTTP p50 ms", 1, "low"),
        Column("http_p99_ms", "HTTP p99 ms", 1, "low"),
        Column("http_cpu_us", "gateway CPU us/job", 1, "low"),
    ),
    measure=measure,
)
