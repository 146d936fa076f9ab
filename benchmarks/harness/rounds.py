"""Rounds: every contender once, in turn, as often as asked (A B C A B C ...), then medians."""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.adapter import PeerError
from harness.scenario import OURS, Column, Figures, Scenario, Stage
from harness.server import PrivateRedis


@dataclass(slots=True)
class Contender:
    """All runs of one contender."""

    name: str
    prepared: dict[str, Any] = field(default_factory=dict)
    runs: list[Figures] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def values(self, key: str) -> list[float]:
        """The figures of one column; empty unless every run has one."""
        found = [run.get(key) for run in self.runs]
        return [] if None in found else [value for value in found if value is not None]

    def median(self, key: str) -> float | None:
        values = self.values(key)
        return statistics.median(values) if values else None


@dataclass(slots=True)
class Results:
    """The contenders of one scenario, and what can be said about them together."""

    scenario: Scenario
    contenders: dict[str, Contender]

    def median(self, name: str, key: str) -> float | None:
        contender = self.contenders.get(name)
        return contender.median(key) if contender else None

    def best_peer(self, key: str) -> float | None:
        """The best median among the peers, by what the column calls better."""
        return best_peer(self.scenario.column(key), list(self.contenders.values()))

    def ratio(self, name: str) -> float | None:
        """This contender's headline figure over that of the best peer."""
        best = self.best_peer(self.scenario.headline)
        own = self.median(name, self.scenario.headline)
        return own / best if own is not None and best else None


def best_peer(column: Column, contenders: Sequence[Contender]) -> float | None:
    """None when no peer has that figure."""
    medians = [one.median(column.key) for one in contenders if one.name not in OURS]
    known = [median for median in medians if median is not None]
    if not known:
        return None
    return min(known) if column.better == "low" else max(known)


def play(
    scenario: Scenario,
    names: Sequence[str],
    server: PrivateRedis,
    *,
    repeats: int,
    jobs: int,
    patience_s: float,
    after_round: Callable[[Results], None],
) -> Results:
    """Run all rounds; a contender that fails is recorded, and the others go on."""
    results = Results(scenario, {name: Contender(name) for name in names})
    for number in range(1, repeats + 1):
        for contender in results.contenders.values():
            began = time.monotonic()
            outcome = _once(contender, Stage(server, jobs, patience_s), scenario)
            _say(f"round {number}/{repeats}  {contender.name:<17} {outcome}", began)
        after_round(results)
    return results


def _once(contender: Contender, stage: Stage, scenario: Scenario) -> str:
    try:
        figures = scenario.measure(stage, contender.name)
    except PeerError as error:
        contender.errors.append(str(error))
        return f"FAILED: {error}"
    finally:
        contender.prepared.update(stage.prepared)
        shutil.rmtree(stage.folder, ignore_errors=True)
    contender.runs.append(figures)
    return "  ".join(
        f"{column.heading} {figures[column.key]:,.{column.digits}f}"
        for column in scenario.columns
        if figures.get(column.key) is not None
    )


def _say(text: str, began: float) -> None:
    print(f"  {text}  ({time.monotonic() - began:.1f} s)", file=sys.stderr, flush=True)
