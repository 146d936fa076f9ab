"""What becomes of jobs whose worker is killed: lost, run twice, and how soon they run again."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from harness import processes
from harness.adapter import Peer, PeerError
from harness.drain import fill
from harness.scenario import QUEUES, Column, Figures, Goal, Scenario, Stage
from harness.waiting import until

CONCURRENCY = 10


@dataclass(slots=True)
class Log:
    """What the handlers wrote before and after they slept; the file outlives their process."""

    path: Path
    begun: Counter[int] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    first_end_s: dict[int, float] = field(default_factory=dict)
    _read: int = 0

    def refresh(self) -> None:
        """Take in what was written since the last call; a half-written line waits."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in whole.splitlines():
            what, number, at_ns, _ = line.split()
            self._take(what, int(number), int(at_ns) / 1e9)

    def running(self) -> set[int]:
        """Jobs that began and have not ended."""
        return {number for number in self.begun if number not in self.ended}

    def _take(self, what: bytes, number: int, at_s: float) -> None:
        if what == b"begin":
            self.begun[number] += 1
            return
        self.ended[number] += 1
        self.first_end_s.setdefault(number, at_s)


def measure(stage: Stage, name: str) -> Figures:
    """kill -9 of the worker and all its processes halfway; a second worker starts at once."""
    with stage.peer(name, concurrency=CONCURRENCY) as peer:
        log = Log(peer.probe.with_suffix(".log"))
        fill(peer, "nap", stage.jobs)
        first = peer.start_worker()
        _until_halfway(log, stage.jobs // 2, peer, within_s=60 + stage.jobs / 20)
        processes.kill(first)
        killed_s = time.monotonic()
        log.refresh()
        in_flight = log.running()
        peer.start_worker()
        _until_all_ended(log, stage)
    lost = stage.jobs - len(log.ended)
    return {
        "in_flight": len(in_flight),
        "lost": lost,
        "twice": sum(count > 1 for count in log.ended.values()),
        "restarted": sum(count > 1 for count in log.begun.values()),
        "recovery_s": None if lost else _recovery_s(log, in_flight, killed_s),
    }


def _recovery_s(log: Log, in_flight: set[int], killed_s: float) -> float:
    """From the kill to the end of the last job that it had interrupted (0 if it hit none)."""
    return max((log.first_end_s[number] - killed_s for number in in_flight), default=0.0)


def _until_halfway(log: Log, count: int, peer: Peer, *, within_s: float) -> None:
    """Until `count` jobs have ended and others run: between two batches a kill hits nothing."""

    def is_halfway() -> bool:
        log.refresh()
        return len(log.ended) >= count and len(log.running()) >= CONCURRENCY // 2

    if not until(is_halfway, within_s=within_s, every_s=0.005):
        raise PeerError(f"{peer.name}: only {len(log.ended)} jobs ended in {within_s:.0f} s")


def _until_all_ended(log: Log, stage: Stage) -> None:
    """Patience may end before they do: then some count as lost."""

    def has_ended() -> bool:
        log.refresh()
        return len(log.ended) >= stage.jobs

    until(has_ended, within_s=stage.patience_s)


SCENARIO = Scenario(
    name="kill",
    title="kill -9 of a worker among jobs of 50 ms",
    about=(
        "One worker at concurrency 10, everything else at its defaults, is killed with all its "
        "processes when half of the jobs have ended; a second one starts at once. `not done` "
        "counts jobs that never ended within the patience after the kill (60 s unless said); "
        "`ended twice` jobs whose handler ran to its end twice; `started twice` those begun again. "
        "Recovery is the time from the kill to the end of the last interrupted job."
    ),
    contenders=QUEUES,
    jobs=1_000,
    quick_jobs=100,
    headline="recovery_s",
    columns=(
        Column("in_flight", "in flight at the kill"),
        Column("lost", "not done", 0, "low"),
        Column("twice", "ended twice", 0, "low"),
        Column("restarted", "started twice"),
        Column("recovery_s", "recovery s", 1, "low", absent="not within the patience"),
    ),
    measure=measure,
    goals=(
        Goal("tenure loses no job", lambda median: median("tenure", "lost"), most=0),
        Goal(
            "tenure recovers within the patience (s)",
            lambda median: median("tenure", "recovery_s"),
        ),
    ),
)
