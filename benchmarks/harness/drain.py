"""The measurement that several scenarios share: one worker process empties a filled queue."""

from __future__ import annotations

from dataclasses import dataclass

from harness import processes
from harness.adapter import Peer
from harness.scenario import Stage


@dataclass(frozen=True, slots=True)
class Drained:
    """What one worker process took for `jobs` no-op jobs."""

    jobs: int
    seconds: float
    worker_cpu_s: float
    redis_cpu_s: float
    commands: int
    scripts: int
    rss_mb: float
    rss_all_mb: float


def drain(stage: Stage, name: str) -> Drained:
    """Fill the queue, start one worker, wait until every effect of every job is in the store.

    The clock runs from the start of the first handler to the moment when the store holds nothing
    unfinished: start-up is left out, and a worker that settles in batches gains nothing by it.
    """
    with stage.peer(name) as peer:
        fill(peer, "noop", stage.jobs)
        stage.server.reset_counters()
        worker = peer.start_worker(expect=stage.jobs)
        peer.wait_for(peer.probe, worker, within_s=60 + stage.jobs / 20)
        settled_s = peer.until_settled()
        spent = stage.server.spent()
        told = peer.told()
        return Drained(
            jobs=stage.jobs,
            seconds=settled_s - told["first_ns"] / 1e9,
            worker_cpu_s=(told["cpu_last_ns"] - told["cpu_first_ns"]) / 1e9,
            redis_cpu_s=spent.cpu_s,
            commands=spent.commands,
            scripts=spent.scripts,
            rss_mb=processes.rss_mb(told["pid"]),
            rss_all_mb=processes.usage(worker.pid).rss_mb,
        )


def fill(peer: Peer, task: str, count: int) -> float:
    """Enqueue in the fastest way the peer has; the seconds it took."""
    mode = next(mode for mode in ("bulk", "concurrent", "single") if mode in peer.prepared.modes)
    return float(peer.ask("enqueue", task=task, count=count, mode=mode)["seconds"])
