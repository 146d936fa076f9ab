"""Incremental audits of a lake: each run reads only new events and the open jobs of the last run.

Jobs that are proven and have ended are not checked again. A run writes what it found (table
`violations`), the proofs of open jobs (`audit_open`), and last its summary (`audit_runs`): rows of
a run that has no summary do not count, and the next run replaces them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

from tenure.pipeline.audit.explain import VIOLATIONS
from tenure.pipeline.audit.run import ROW, Audit, Audited, History, Verdict
from tenure.pipeline.lake import Lake, between, forgotten_property, lake_events

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The version of the stored rows and of the checks: another version means a full audit.
FORM = 6
_RUN = pa.field("run", pa.string())
_RUNS = pa.schema([_RUN, ("state", pa.string())])
_OPEN = pa.schema([*((name, pa.int64()) for name in ROW), _RUN])
_FOUND = pa.schema([*VIOLATIONS, _RUN])


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The state after an audit of a lake; `runs` are those whose violations count."""

    form: int = FORM
    run: int = 0
    positions: dict[str, int] = {}
    runs: list[int] = []
    ended: dict[str, int] = {}
    carried_events: int = 0
    total: Audited | None = None


def audit_lake(
    spark: SparkSession, address: str, *, full: bool = False, quiesced: bool = False
) -> Audited:
    """Audit what is new in a lake, or all of it; the summary is of everything so far."""
    lake = Lake(address)
    lake.require()
    before = read_state(lake)
    # Whether every job has ended can only be asked of all of them.
    is_new = full or quiesced or before.form != FORM
    known = State(run=before.run) if is_new else before
    upto = lake.events.positions(list(lake.journals()))
    if known.total is not None and known.positions == upto:
        return known.total
    run = before.run + 1
    audit = Audit(spark, _history(spark, lake, known, upto, quiesced=quiesced))
    try:
        _store(lake, "violations", _FOUND, None if audit.is_clean else audit.violations, run)
        _store(lake, "audit_open", _OPEN, audit.carry(), run)
        state, total = _after(known, audit, run, upto)
    finally:
        audit.close()
    runs = lake.table("audit_runs")
    runs.create(_RUNS, "run")
    row = {"run": str(run), "state": msgspec.json.encode(state).decode()}
    runs.put(pa.Table.from_pylist([row], _RUNS), "run")
    _tidy(lake, state)
    return total


def bytes_to_read(address: str, *, full: bool) -> int | None:
    """How much an audit of the lake would read at most; None where only the bucket knows."""
    folder = Path(address) / "events"
    if "://" in address or not folder.is_dir():
        return None
    lake = Lake(address)
    upto = lake.events.positions(list(lake.journals()))
    return lake.events.size(between({} if full else read_state(lake).positions, upto))


def read_state(lake: Lake) -> State:
    """What is known; empty before the first audit."""
    rows = lake.table("audit_runs").rows()
    if not rows:
        return State()
    last = max(rows, key=lambda row: int(row["run"]))
    return msgspec.json.decode(last["state"], type=State)


def violations(spark: SparkSession, lake: Lake) -> DataFrame | None:
    """All that was found and still counts; None before the first audit."""
    state = read_state(lake)
    if not state.runs:
        return None
    return lake.table("violations").read(spark, _of_runs(state.runs)).drop("run")


def cut_journals(lake: Lake) -> list[str]:
    """Journals that were not captured from their first entry on, have a gap, or jobs erased."""
    kept, names = lake.events.properties(), list(lake.journals())
    late = {name for name in names if lake.events.begins_late(name)}
    erased = {name for name in names if forgotten_property(name) in kept}
    return sorted(late | erased | {gap.journal for gap in lake.gaps()})


def _history(
    spark: SparkSession, lake: Lake, known: State, upto: dict[str, int], *, quiesced: bool
) -> History:
    outboxes = {name: position for name, position in upto.items() if "-outbox-" in name}
    carried = lake.table("audit_open").read(spark, _of_runs([known.run])) if known.runs else None
    return History(
        new=lake_events(spark, lake, between(known.positions, upto)),
        all=lambda: lake_events(spark, lake, between({}, upto)),
        carried=carried,
        cut=cut_journals(lake),
        quiesced=quiesced,
        outbox=lake_events(spark, lake, between({}, outboxes)) if outboxes else None,
        checked_upto=known.positions,
    )


def _of_runs(runs: list[int]) -> str:
    return f"run in ({', '.join(repr(str(run)) for run in runs)})"


def _store(lake: Lake, name: str, schema: pa.Schema, rows: DataFrame | None, run: int) -> None:
    """Store the rows of a run; those that a killed run of the same number left are replaced."""
    table = lake.table(name)
    table.create(schema, "run")
    if rows is not None:
        named = rows.withColumn("run", F.lit(str(run)))
        table.write(named, after={}, upto={}, remove=[str(run)], partition_by="run")


def _after(known: State, audit: Audit, run: int, upto: dict[str, int]) -> tuple[State, Audited]:
    """The totals of earlier runs and this one; events of carried jobs are counted once."""
    counts, found = audit.counts(), audit.result()
    jobs = dict(known.ended)
    ended = dict(known.ended)
    for contract, row in counts.items():
        new = row.jobs - (row.again if known.runs else 0)
        jobs[contract] = jobs.get(contract, 0) + new
        ended[contract] = jobs[contract] - row.open_jobs
    before = known.total
    total = Audited(
        events=found.events + (before.events - known.carried_events if before else 0),
        jobs=sum(jobs.values()),
        open_jobs=found.open_jobs,
        begins_late=found.begins_late + (before.begins_late if before else 0),
        looked_at=found.looked_at + (before.looked_at if before else 0),
        verdicts=_added(before, audit.verdicts(jobs)),
    )
    state = State(
        run=run,
        positions=upto,
        runs=[*known.runs, run],
        ended=ended,
        carried_events=sum(row.open_events for row in counts.values()),
        total=total,
    )
    return state, total


def _added(before: Audited | None, verdicts: list[Verdict]) -> list[Verdict]:
    old = {each.invariant: each for each in before.verdicts} if before else {}
    return [
        msgspec.structs.replace(
            each,
            violations=each.violations + old[each.invariant].violations,
            unobserved=each.unobserved + old[each.invariant].unobserved,
        )
        # What is not shown here is unobserved for all jobs so far, which are counted already.
        if each.invariant in old and not each.reason
        else each
        for each in verdicts
    ]


def _tidy(lake: Lake, state: State) -> None:
    """Remove the rows of runs that do not count any more."""
    lake.table("audit_open").remove_all_but([str(state.run)])
    lake.table("violations").remove_all_but([str(run) for run in state.runs])
