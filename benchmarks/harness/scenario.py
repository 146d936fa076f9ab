"""What a scenario is made of, as data; the scenarios themselves are in scenarios/."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from harness.adapter import Peer
from harness.server import PrivateRedis

Figures = Mapping[str, float | None]
"""One run of one contender; None says that this contender has no such figure."""

Median = Callable[[str, str], float | None]
"""The median of one contender's column; None where it was not measured."""

OURS = (
    *("tenure", "tenure_bullmq", "tenure_omniq", "bare_pipelines"),
    *("tenure_inbox", "tenure_inbox_sqlite", "tenure_plane", "bare_sql"),
    *("tenure_inbox_events", "tenure_inbox_sqlite_events"),
    *("primaries_1", "primaries_2", "primaries_3"),
)
"""Contenders that are not peers: ratios are to the best of the others."""

QUEUES = ("tenure", "taskiq", "saq", "arq", "streaq", "dramatiq", "huey", "celery", "rq")


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of the table. `absent` is shown where a contender has none."""

    key: str
    heading: str
    digits: int = 0
    better: Literal["high", "low"] | None = None
    absent: str = "-"


@dataclass(frozen=True, slots=True)
class Goal:
    """A target: `value` reads medians (contender, column) and answers None if it cannot be told."""

    claim: str
    value: Callable[[Median], float | None]
    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        enough = self.least is None or value >= self.least
        return enough and (self.most is None or value <= self.most)


def ratio(own: str, other: str, key: str, other_key: str = "") -> Callable[[Median], float | None]:
    """For a goal: a figure of one contender over the same, or another one, of another."""

    def value(median: Median) -> float | None:
        ours, theirs = median(own, key), median(other, other_key or key)
        return None if ours is None or not theirs else ours / theirs

    return value


@dataclass(frozen=True, slots=True)
class Stage:
    """What one measurement gets: the server, how many jobs, and how long it may be patient."""

    server: PrivateRedis
    jobs: int
    patience_s: float
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="tenure-run-")))
    prepared: dict[str, object] = field(default_factory=dict)

    def peer(self, name: str, *, concurrency: int | None = None) -> Peer:
        """The contender's adapter, started against an empty server."""
        self.server.fresh()
        peer = Peer(name, self.server, self.folder, concurrency=concurrency)
        self.prepared.update(
            versions=peer.prepared.versions,
            notes=peer.prepared.notes,
            worker=" ".join(peer.prepared.worker).replace(self.server.url, "URL"),
        )
        return peer

    def part(self, divisor: int) -> Stage:
        """The same with a part of the jobs, for those of whom a round would take too long."""
        return replace(self, jobs=self.jobs // divisor)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`measure` runs one contender once; `headline` is the column that ratios are taken of."""

    name: str
    title: str
    about: str
    contenders: tuple[str, ...]
    jobs: int
    quick_jobs: int
    columns: tuple[Column, ...]
    headline: str
    measure: Callable[[Stage, str], Figures]
    goals: tuple[Goal, ...] = ()
    clients: int = 2_000

    def column(self, key: str) -> Column:
        return next(column for column in self.columns if column.key == key)
