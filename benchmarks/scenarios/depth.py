"""What a job of a BullMQ queue costs the server while few or very many others wait."""

from __future__ import annotations

from typing import cast

from harness.adapter import PeerError
from harness.scenario import Column, Figures, Goal, Scenario, Stage
from harness.waiting import until

DEPTHS = (1_000, 10_000, 100_000, 1_000_000)
OURS, NODE = "tenure_bullmq", "bullmq_node"
CONCURRENCY = 100
WARM_UP = 500
COMPLETED = "bull:bench:completed"


def measure(stage: Stage, name: str) -> Figures:
    """The server's CPU time per job at each depth that the size of the run allows."""
    figures: dict[str, float | None] = {}
    for depth in DEPTHS:
        asked = depth <= stage.jobs
        figures[_key(depth)] = _cost_us(stage, name, depth) if asked else None
    shallow, deep = figures[_key(DEPTHS[0])], figures[_key(DEPTHS[-1])]
    figures["growth"] = deep / shallow if deep and shallow else None
    return figures


def _cost_us(stage: Stage, name: str, depth: int) -> float:
    """While so many jobs are measured, the queue shrinks from `depth` and these to `depth`."""
    measured = min(max(depth, 1_000), 10_000)
    with stage.peer(name, concurrency=CONCURRENCY) as peer:
        total = depth + measured + WARM_UP
        peer.ask("enqueue", within_s=3_600, task="noop", count=total, mode="bulk")
        peer.start_worker(expect=total)
        begin = _until_completed(stage, WARM_UP)
        stage.server.reset_counters()
        end = _until_completed(stage, begin + measured)
        return stage.server.spent().cpu_s / (end - begin) * 1e6


def _until_completed(stage: Stage, count: int, within_s: float = 120) -> int:
    def done() -> int:
        return cast("int", stage.server.call("ZCARD", COMPLETED))

    if not until(lambda: done() >= count, within_s=within_s, every_s=0.005):
        raise PeerError(f"{done()} of {count} jobs completed within {within_s:.0f} s")
    return done()


def _key(depth: int) -> str:
    return f"d{depth}"


SCENARIO = Scenario(
    name="depth",
    title="Redis CPU per job while others wait in the same BullMQ queue",
    about=(
        "The queue is filled; then one worker process runs no-op jobs, 100 at once, and the "
        "server's CPU time is taken over up to 10,000 of them, in microseconds a job. No step "
        "looks at more jobs than it takes, whoever's scripts they are; what grows is the time to "
        "reach memory that has left the processor's caches, since the oldest of a million jobs "
        "was written long ago."
    ),
    contenders=(OURS, NODE),
    jobs=1_000_000,
    quick_jobs=10_000,
    headline=_key(DEPTHS[0]),
    columns=(
        *(Column(_key(depth), f"us/job, {depth:,} waiting", 1, "low") for depth in DEPTHS),
        Column("growth", "1,000,000 over 1,000", 2, "low"),
    ),
    measure=measure,
    goals=(
        Goal(
            "at 1,000,000 at most 1.5 times the cost at 1,000",
            lambda median: median(OURS, "growth"),
            most=1.5,
        ),
    ),
)
