"""How long a claim takes beside few rows and beside very many, of every kind."""

from __future__ import annotations

import os
from itertools import product

from harness.postgres import shared_postgres
from harness.quantiles import quantile
from harness.scenario import Column, Figures, Goal, Median, Scenario, Stage

KINDS = ("queued", "later", "finished")
FEW = 10_000
ON_POSTGRES, ON_SQLITE = "tenure_inbox", "tenure_inbox_sqlite"


def measure(stage: Stage, name: str) -> Figures:
    """The p99 of claims of ten, in milliseconds, and how it grows with the rows of each kind."""
    figures: dict[str, float | None] = {}
    for kind in KINDS:
        few, many = (_p99_ms(stage, name, kind, rows) for rows in (FEW, stage.jobs))
        figures |= {f"{kind}_few": few, f"{kind}_many": many, f"{kind}_growth": many / few}
    return figures


def _p99_ms(stage: Stage, name: str, kind: str, rows: int) -> float:
    shared_postgres().fresh()
    os.environ["BENCH_SQLITE_FILE"] = str(stage.folder / f"{kind}{rows}.db")
    with stage.peer(name) as peer:
        peer.ask("beside", within_s=1_800, kind=kind, rows=rows)
        taken = peer.ask("claims", within_s=300, count=500)["seconds"]
        return quantile(taken, 0.99) * 1000


def _worst(name: str) -> Goal:
    def value(median: Median) -> float | None:
        grown = [median(name, f"{kind}_growth") for kind in KINDS]
        return max((each for each in grown if each is not None), default=None)

    return Goal(f"{name}: beside very many at most 2 times the p99 beside few", value, most=2)


SCENARIO = Scenario(
    name="claims",
    title="Claims of the inbox beside many rows",
    about=(
        "Rows of one kind are put in: queued jobs, jobs for later, or finished ones. Then ten jobs "
        "at a time are claimed and settled, 500 times, and the claims are timed, p99 in "
        f"milliseconds; once beside {FEW:,} rows and once beside as many as the size of the run."
    ),
    contenders=(ON_POSTGRES, ON_SQLITE),
    jobs=1_000_000,
    quick_jobs=20_000,
    headline="queued_many",
    columns=(
        *(
            Column(f"{kind}_{size}", f"{kind}, {size}", 2, "low")
            for kind, size in product(KINDS, ("few", "many"))
        ),
        *(Column(f"{kind}_growth", f"{kind}: growth", 2, "low") for kind in KINDS),
    ),
    measure=measure,
    goals=(_worst(ON_POSTGRES), _worst(ON_SQLITE)),
)
