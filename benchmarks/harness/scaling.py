"""The figures of docs/operating/scaling.md, computed from the costs per job in results/.

`run.py --page` brings the page up to date; a test holds the two together. What is assumed, and not
measured, is in `Plan`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from .comparison import BENCHMARKS, FIGURES, RESULTS, between

PAGE = BENCHMARKS.parent / "docs" / "operating" / "scaling.md"
SCENARIOS = ("cluster", "enqueue")
RATES = (1_000, 100_000, 10_000_000)
_MONTH_H = 730
_SHARDS_MAX = 128  # of one queue
_NODES_MAX = 1_000  # what Redis Cluster is made for, replicas included


@dataclass(frozen=True, slots=True)
class Costs:
    """What one job costs, as measured: a no-op with a payload of 15 bytes, from submit to end."""

    redis_us: float
    worker_us: float
    submitter_us: float
    gateway_us: float
    network_bytes: float
    kept_bytes: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What is assumed. Money is in dollars, for a core and for a gigabyte of memory, an hour."""

    busy: float = 0.6
    replicas: int = 1
    kept_s: int = 3_600
    redis_gb: int = 32
    core_h: float = 0.04
    gb_h: float = 0.005


@dataclass(frozen=True, slots=True)
class Need:
    """What a rate needs. `by_cpu` and `by_memory` are the primaries that each alone would ask."""

    jobs_per_s: int
    by_cpu: int
    by_memory: int
    queues: int
    clusters: int
    worker_cores: int
    submitter_cores: int
    gateway_cores: int
    network_mb_per_s: float
    redis_money: float
    worker_money: float

    @property
    def primaries(self) -> int:
        """How many primaries it takes."""
        return max(self.by_cpu, self.by_memory)


def read_costs(folder: Path = RESULTS) -> Costs:
    """The costs, from the results of `SCENARIOS`."""

    def median(scenario: str, contender: str, column: str) -> float:
        told = json.loads((folder / f"{scenario}.json").read_text())
        return float(told["contenders"][contender]["summary"][column]["median"])

    sharded = ("cluster", "primaries_3")
    return Costs(
        redis_us=median(*sharded, "redis_cpu_us") + median(*sharded, "submit_cpu_us"),
        worker_us=median(*sharded, "worker_cpu_us"),
        submitter_us=median("enqueue", "tenure", "client_cpu_us"),
        gateway_us=median("enqueue", "tenure", "http_cpu_us"),
        network_bytes=median(*sharded, "net_bytes"),
        kept_bytes=median(*sharded, "kept_bytes"),
    )


def need(rate: int, costs: Costs, plan: Plan) -> Need:
    """What it takes to do so many jobs a second."""

    def cores(cost_us: float) -> int:
        return math.ceil(rate * cost_us / 1e6 / plan.busy)

    by_cpu = cores(costs.redis_us)
    by_memory = math.ceil(rate * plan.kept_s * costs.kept_bytes / (plan.redis_gb * 1e9))
    primaries = max(by_cpu, by_memory)
    nodes = primaries * (1 + plan.replicas)
    worker_cores = cores(costs.worker_us)
    node_h = plan.core_h + plan.redis_gb * plan.gb_h
    return Need(
        jobs_per_s=rate,
        by_cpu=by_cpu,
        by_memory=by_memory,
        queues=math.ceil(primaries / _SHARDS_MAX),
        clusters=math.ceil(nodes / _NODES_MAX),
        worker_cores=worker_cores,
        submitter_cores=cores(costs.submitter_us),
        gateway_cores=cores(costs.gateway_us),
        network_mb_per_s=rate * costs.network_bytes / 1e6,
        redis_money=nodes * node_h * _MONTH_H,
        worker_money=worker_cores * (plan.core_h + 2 * plan.gb_h) * _MONTH_H,
    )


def refreshed(page: str, folder: Path = RESULTS) -> str:
    """The page with the figures that follow from `folder` now."""
    costs, plan = read_costs(folder), Plan()
    parts = [_measured(costs), _assumed(plan), _needs([need(rate, costs, plan) for rate in RATES])]
    return between(page, FIGURES, "\n\n" + "\n\n".join(parts) + "\n\n")


def write_page(folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Bring the page up to date."""
    page.write_text(refreshed(page.read_text(), folder))


def _measured(costs: Costs) -> str:
    told = {
        "Redis CPU, submit and work": f"{costs.redis_us:.1f} us",
        "worker CPU": f"{costs.worker_us:.1f} us",
        "CPU of the program that submits, in bulk": f"{costs.submitter_us:.1f} us",
        "CPU of a gateway, one POST a job": f"{costs.gateway_us:.0f} us",
        "network of Redis, in and out": f"{costs.network_bytes:,.0f} bytes",
        "memory of Redis while the job is kept": f"{costs.kept_bytes:,.0f} bytes",
    }
    return _table(["a job costs", "measured"], [list(row) for row in told.items()])


def _assumed(plan: Plan) -> str:
    told = {
        "busy": f"a core is planned to be busy for {plan.busy:.0%} of the time",
        "replicas": f"{plan.replicas} for each primary, on a machine of the same size",
        "kept_s": f"finished jobs are kept for {plan.kept_s:,} s (`ttl_s`)",
        "redis_gb": f"a primary has one core and {plan.redis_gb} GB for data",
        "core_h": f"{plan.core_h} dollars for a core an hour",
        "gb_h": f"{plan.gb_h} dollars for a gigabyte of memory an hour",
    }
    missing = {field.name for field in fields(Plan)} - told.keys()
    assert not missing, f"the page does not say {missing}"
    return _table(["", "assumed"], [[f"`{name}`", text] for name, text in told.items()])


def _needs(needs: Sequence[Need]) -> str:
    rows = {
        "primaries by CPU": [f"{each.by_cpu:,}" for each in needs],
        "primaries by memory": [f"{each.by_memory:,}" for each in needs],
        "**primaries**": [f"**{each.primaries:,}**" for each in needs],
        "queues of at most 128 shards": [f"{each.queues:,}" for each in needs],
        "clusters of at most 1,000 nodes": [f"{each.clusters:,}" for each in needs],
        "cores of workers, without the work itself": [f"{each.worker_cores:,}" for each in needs],
        "cores that submit in bulk": [f"{each.submitter_cores:,}" for each in needs],
        "cores of gateways, if each job is a POST": [f"{each.gateway_cores:,}" for each in needs],
        "network of all nodes, MB/s": [f"{each.network_mb_per_s:,.1f}" for each in needs],
        "Redis, dollars a month": [f"{each.redis_money:,.0f}" for each in needs],
        "workers, dollars a month": [f"{each.worker_money:,.0f}" for each in needs],
    }
    head = ["jobs a second", *(f"{each.jobs_per_s:,}" for each in needs)]
    return _table(head, [[name, *cells] for name, cells in rows.items()])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
