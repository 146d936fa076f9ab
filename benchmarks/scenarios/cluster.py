"""What a queue with shards costs on a Redis Cluster, and how evenly its nodes share the work."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import cast

from harness.cluster import PrivateCluster
from harness.drain import drain, fill
from harness.scenario import Column, Figures, Goal, Scenario, Stage, ratio
from harness.server import PrivateRedis

PRIMARIES = {"primaries_1": 1, "primaries_2": 2, "primaries_3": 3}


def measure(stage: Stage, name: str) -> Figures:
    primaries = PRIMARIES[name]
    shards = f"&shards={primaries}" if primaries > 1 else ""
    os.environ["BENCH_URL_OPTIONS"] = f"namespace={{bench}}:{shards}"
    try:
        with PrivateCluster(primaries) as cluster:
            # It has all of a server that producers and workers of this scenario use.
            on_cluster = replace(stage, server=cast("PrivateRedis", cluster))
            empty_mb, figures = _submitted(on_cluster, cluster)
            done = drain(on_cluster, "tenure")
            each = [spent.cpu_s for spent in cluster.spent_each()]
            return {
                **figures,
                "jobs_per_s": done.jobs / done.seconds,
                "worker_cpu_us": done.worker_cpu_s / done.jobs * 1e6,
                "redis_cpu_us": done.redis_cpu_s / done.jobs * 1e6,
                "node_cpu_us": max(each) / done.jobs * 1e6,
                "balance": max(each) / sum(each) * primaries,
                "scripts": done.scripts / done.jobs,
                "net_bytes": cluster.network_bytes() / done.jobs + figures["net_bytes"],
                "kept_bytes": (cluster.used_memory_mb() - empty_mb) * 1e6 / done.jobs,
            }
    finally:
        del os.environ["BENCH_URL_OPTIONS"]


def _submitted(stage: Stage, cluster: PrivateCluster) -> tuple[float, dict[str, float]]:
    """The memory of the empty servers, and what it costs to put the jobs in, in bulk."""
    with stage.peer("tenure") as peer:
        fill(peer, "noop", 1)  # connected, and the scripts are loaded
        empty_mb = cluster.used_memory_mb()
        cluster.reset_counters()
        seconds = fill(peer, "noop", stage.jobs)
        return empty_mb, {
            "submits_per_s": stage.jobs / seconds,
            "submit_cpu_us": cluster.spent().cpu_s / stage.jobs * 1e6,
            "waiting_bytes": (cluster.used_memory_mb() - empty_mb) * 1e6 / stage.jobs,
            "net_bytes": cluster.network_bytes() / stage.jobs,
        }


SCENARIO = Scenario(
    name="cluster",
    title="A streams queue with shards on a Redis Cluster",
    about=(
        "One, two and three primaries without replicas, all on this machine, and one worker "
        "process. On one primary the queue has one shard, on two and three as many as there are "
        "primaries. All processes share the machine's cores, so jobs a second say little about "
        "a cluster of several machines; Redis CPU per job, of all nodes and of the busiest one, "
        "says what each node would have to do there. `balance` is the CPU of the busiest node "
        "over an equal share. Jobs are put in in bulk, then run, as in the scenario `noop`. Bytes "
        "are of a job with a payload of 15 bytes: sent and received by Redis from submit to end, "
        "kept while it waits, and kept after its end with its share of the journal."
    ),
    contenders=tuple(PRIMARIES),
    jobs=60_000,
    quick_jobs=2_000,
    headline="redis_cpu_us",
    columns=(
        Column("redis_cpu_us", "Redis CPU us/job", 1, "low"),
        Column("node_cpu_us", "of the busiest node", 1, "low"),
        Column("balance", "balance", 2, "low"),
        Column("submit_cpu_us", "Redis CPU us/submit", 1, "low"),
        Column("worker_cpu_us", "worker CPU us/job", 1, "low"),
        Column("jobs_per_s", "jobs/s", better="high"),
        Column("submits_per_s", "submits/s", better="high"),
        Column("scripts", "scripts/job", 3),
        Column("net_bytes", "network bytes/job"),
        Column("waiting_bytes", "bytes/waiting job"),
        Column("kept_bytes", "bytes/finished job"),
    ),
    measure=measure,
    goals=(
        Goal(
            "three primaries cost at most 1.15 times the Redis CPU per job of one",
            ratio("primaries_3", "primaries_1", "redis_cpu_us"),
            most=1.15,
        ),
        Goal(
            "putting a job in costs at most 1.15 times as much on three primaries",
            ratio("primaries_3", "primaries_1", "submit_cpu_us"),
            most=1.15,
        ),
        Goal(
            "the busiest of three primaries does at most 1.15 times its share",
            lambda median: median("primaries_3", "balance"),
            most=1.15,
        ),
    ),
)
