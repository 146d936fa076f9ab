"""Checks the jobs that were not proven, event by event, with `core.journal`.

It gets only the events of unproven jobs, sorted by job and position. The result names the broken
invariant and shows the events. A job that is correct after all gives no row, or one that says how
many steps of other programs left no event.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from tenure.core.journal import HistoryChecker, JournalEvent, Violation
from tenure.core.registry import machines
from tenure.pipeline.audit.invariants import FOREIGN
from tenure.pipeline.schema import NAMES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

VIOLATIONS_DDL = (
    "invariant string, journal string, contract string, queue string, job_id string, "
    "text string, evidence string"
)
VIOLATIONS = pa.schema(
    [pa.field(part.split()[0], pa.string()) for part in VIOLATIONS_DDL.split(", ")]
)
UNOBSERVED = "unobserved"
_FIELDS = JournalEvent.__struct_fields__
_PER_BATCH = 1_000
MACHINES = machines()


def explain(events: DataFrame, *, quiesced: bool) -> DataFrame:
    """Violations in these events, which have a column `whole` and are those of whole jobs."""

    def judge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _in_batches(_judged(batches, quiesced))

    ordered = events.select(*NAMES, "whole").repartition("journal", "job_id")
    ordered = ordered.sortWithinPartitions("journal", "contract", "queue", "job_id", "pos", "ver")
    return ordered.mapInArrow(judge, VIOLATIONS_DDL)


def _judged(batches: Iterator[pa.RecordBatch], quiesced: bool) -> Iterator[dict[str, Any]]:
    rows = (row for batch in batches for row in batch.to_pylist())
    for key, group in groupby(
        rows, key=lambda r: (r["journal"], r["contract"], r["queue"], r["job_id"])
    ):
        yield from _of_job(key, list(group), quiesced)


def _of_job(
    key: tuple[str, ...], rows: list[dict[str, Any]], quiesced: bool
) -> Iterator[dict[str, Any]]:
    journal, contract, queue, job_id = key
    named = {"journal": journal, "contract": contract, "queue": queue, "job_id": job_id}
    if contract not in MACHINES:
        yield named | _row(UNOBSERVED, f"no contract {contract!r} is known here", [])
        return
    checker = HistoryChecker(
        MACHINES[contract], whole=rows[0]["whole"], foreign=contract in FOREIGN
    )
    for index, row in enumerate(rows):
        checker.add(index, _event(row))
    checker.finish(quiesced=quiesced)
    for violation in checker.violations:
        yield named | _row(violation.invariant, violation.text, evidence_of(violation))
    steps = checker.unobserved[job_id]
    if steps and not checker.violations:
        yield named | _row(UNOBSERVED, f"{steps} steps of others left no event", [])


def _row(invariant: str, text: str, evidence: list[Any]) -> dict[str, Any]:
    return {
        "invariant": invariant,
        "text": text,
        "evidence": msgspec.json.encode(evidence).decode(),
    }


def evidence_of(violation: Violation) -> list[Any]:
    """The events of a violation as plain objects."""
    return [msgspec.to_builtins(event) for event in violation.evidence]


def _event(row: dict[str, Any]) -> JournalEvent:
    return JournalEvent(**{name: row[name] for name in _FIELDS if row[name] is not None})


def _in_batches(rows: Iterator[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    waiting: list[dict[str, Any]] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) == _PER_BATCH:
            yield pa.RecordBatch.from_pylist(waiting, VIOLATIONS)
            waiting = []
    if waiting:
        yield pa.RecordBatch.from_pylist(waiting, VIOLATIONS)
