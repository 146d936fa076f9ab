"""Incremental audits of a lake: each run reads only new events and the open jobs of the last run.

Jobs that are proven and have ended are not checked again. Violations stay in
`audit/<run>/violations`. The proof rows of open jobs are stored beside them. `audit/state.json`
says which run is the last.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tenure.pipeline.audit.deliveries import outbox_journals
from tenure.pipeline.audit.explain import VIOLATIONS, VIOLATIONS_DDL
from tenure.pipeline.audit.read_plan import plan_reads
from tenure.pipeline.audit.run import Audit, Audited, History, Verdict
from tenure.pipeline.events import lake_events
from tenure.pipeline.lake.files import LakeFiles
from tenure.pipeline.lake.layout import EventFile, event_files
from tenure.pipeline.lake.progress import all_progress, gaps
from tenure.pipeline.lake.reach import require_reach
from tenure.pipeline.source.offsets import epoch_name
from tenure.pipeline.tables.update import committed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

AUDIT = "audit"
_STATE = f"{AUDIT}/state.json"
# The version of the stored rows and of the checks: another version means a full audit.
FORM = 4
_FEW = 50_000


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The state after the last audit of a lake."""

    form: int = 1
    run: int = 0
    places: dict[str, int] = {}
    runs: list[int] = []
    ended: dict[str, int] = {}
    carried_events: int = 0
    total: Audited | None = None


def audit_lake(
    spark: SparkSession, lake_path: str, *, full: bool = False, quiesced: bool = False
) -> Audited:
    """Audit what is new in a lake, or all of it; the summary is of everything so far."""
    lake = LakeFiles(lake_path)
    lake.require()
    before = read_state(lake)
    # Whether every job has ended can only be asked of all of them.
    is_new = full or quiesced or before.form != FORM
    known = State(run=before.run) if is_new else before
    require_reach(spark, lake)
    now = committed(lake)
    settled = [file for file in event_files(lake) if file.upto <= now.get(file.journal, 0)]
    fresh = [file for file in settled if file.upto > known.places.get(file.journal, 0)]
    if known.total is not None and not fresh:
        return known.total
    history = History(
        new=plan_reads(lake, fresh, known.places),
        all=lambda: lake_events(spark, lake, settled),
        carried=_carried(spark, lake, known),
        cut=cut_journals(lake),
        quiesced=quiesced,
        outbox=_outbox(spark, lake, settled),
        checked_upto=known.places,
    )
    run = before.run + 1
    audit = Audit(spark, history)
    try:
        folder = f"{AUDIT}/{run:06d}"
        if audit.is_clean:
            lake.write_table(f"{folder}/violations/none.parquet", VIOLATIONS.empty_table())
        else:
            audit.violations.write.mode("overwrite").parquet(lake.uri(f"{folder}/violations"))
        _write_carried(lake, f"{folder}/carried", audit)
        state, total = _after(known, audit, run, now)
    finally:
        audit.close()
    lake.write_json(_STATE, state)
    _tidy(lake, state)
    return total


def bytes_to_read(lake_path: str, *, full: bool) -> int | None:
    """How much an audit of the lake would read; None where only the store of the lake knows."""
    if "://" in lake_path:
        return None
    lake = LakeFiles(lake_path)
    places = {} if full else read_state(lake).places
    fresh = (file for file in event_files(lake) if file.upto > places.get(file.journal, 0))
    return sum((Path(lake_path) / file.path).stat().st_size for file in fresh)


def read_state(lake: LakeFiles) -> State:
    """What is known; empty before the first audit."""
    kept = lake.read_json(_STATE)
    return msgspec.convert(kept, State) if kept is not None else State()


def violations(spark: SparkSession, lake: LakeFiles) -> DataFrame | None:
    """All that was found and still counts; None before the first audit."""
    state = read_state(lake)
    paths = [lake.uri(f"{AUDIT}/{run:06d}/violations") for run in state.runs]
    return spark.read.schema(VIOLATIONS_DDL).parquet(*paths) if paths else None


def cut_journals(lake: LakeFiles) -> list[str]:
    """Journals that were not captured from their first entry on, or have a gap."""
    names = {gap.journal for gap in gaps(lake)}
    for each in all_progress(lake):
        if not each.is_whole:
            names.add(epoch_name(each.journal, each.epoch))
    return sorted(names)


def _outbox(spark: SparkSession, lake: LakeFiles, settled: list[EventFile]) -> DataFrame | None:
    names = outbox_journals(lake)
    files = [file for file in settled if file.journal in names]
    return lake_events(spark, lake, files) if files else None


def _carried(spark: SparkSession, lake: LakeFiles, known: State) -> DataFrame | None:
    if not known.runs:
        return None
    return spark.read.parquet(lake.uri(f"{AUDIT}/{known.run:06d}/carried"))


def _write_carried(lake: LakeFiles, folder: str, audit: Audit) -> None:
    """Usually few jobs are open; these are written by the driver, without further tasks."""
    if sum(row.open_jobs for row in audit.counts().values()) > _FEW:
        audit.carry().write.mode("overwrite").parquet(lake.uri(folder))
    else:
        lake.write_table(f"{folder}/open.parquet", audit.carry().toArrow())


def _after(known: State, audit: Audit, run: int, places: dict[str, int]) -> tuple[State, Audited]:
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
        form=FORM,
        run=run,
        places=places,
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
        # What no journal shows is unobserved for all jobs so far, which are counted already.
        if each.invariant in old and not each.reason
        else each
        for each in verdicts
    ]


def _tidy(lake: LakeFiles, state: State) -> None:
    for name in lake.names(AUDIT):
        if name.isdecimal() and int(name) not in state.runs:
            lake.remove(f"{AUDIT}/{name}")
        elif name.isdecimal() and int(name) != state.run:
            lake.remove(f"{AUDIT}/{name}/carried")
