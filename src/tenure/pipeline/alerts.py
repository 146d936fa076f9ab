"""What somebody should be paged about, from the tables of a lake; read without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tenure.core.errors import NotFound
from tenure.pipeline.audit.lakes import read_state
from tenure.pipeline.lake.place import Lake


def alerts(lake: Lake, shares: Mapping[str, float]) -> list[str]:
    """One line for each service level that was missed on the newest day, and each broken promise.

    `shares` maps queues to the share of jobs that must have ended well within the target; "" is for
    all others.
    """
    lake.require()
    return [*_levels(lake, shares), *_promises(lake)]


def _levels(lake: Lake, shares: Mapping[str, float]) -> Iterator[str]:
    table = lake.table("slo")
    if table.opened() is None:
        raise NotFound(
            f"there is no table 'slo' in {lake.name}; "
            f"`tenure pipeline tables --lake {lake.name}` makes it"
        )
    newest = max(table.parts(), default="")
    for row in table.rows([("day", "=", newest)]) if newest else []:
        wanted = shares.get(row["queue"], shares.get("", 0.0))
        if row["share"] < wanted:
            yield (
                f"{row['contract']} {row['queue']}: {row['share']:.1%} of {row['finished']:,} jobs "
                f"ended well within {row['target_ms'] / 1000:g} s on {newest}; wanted {wanted:.1%}"
            )


def _promises(lake: Lake) -> Iterator[str]:
    total = read_state(lake).total
    for verdict in total.verdicts if total else ():
        if verdict.violations:
            yield f"{verdict.invariant} was broken {verdict.violations:,} times: {verdict.text}"
