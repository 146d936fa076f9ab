"""One audit: prove, explain what was not proven, look at the lines, sum up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812
from pyspark.storagelevel import StorageLevel

from leasehold.pipeline.audit import lines
from leasehold.pipeline.audit.explain import UNOBSERVED, explain
from leasehold.pipeline.audit.invariants import INVARIANTS, Invariant, applies_to
from leasehold.pipeline.audit.proof import (
    CONTRACTS,
    KEYS,
    Steps,
    has_ended,
    job_keys,
    merged,
    proof,
    unproven,
)
from leasehold.pipeline.schema import NAMES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_DERIVED = {"ver", "from_state", "prev_fence", "prev_lease_until_ms"}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the summary: an invariant, whom it was asked of, what came of it."""

    invariant: str
    text: str
    contracts: str
    jobs: int
    violations: int
    unobserved: int

    @property
    def mark(self) -> str:
        """In a word: broken, sound, or not to be seen."""
        if self.violations:
            return "BROKEN"
        return "sound" if self.jobs > self.unobserved else "not seen"


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found. `events` counts what was read for it, `open_jobs` what has not ended."""

    events: int
    jobs: int
    open_jobs: int
    begins_late: int
    looked_at: int
    verdicts: list[Verdict]

    @property
    def violations(self) -> int:
        """How many in all."""
        return sum(each.violations for each in self.verdicts)

    @property
    def broken(self) -> list[str]:
        """The numbers of the broken invariants."""
        return [each.invariant for each in self.verdicts if each.violations]


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What is audited: new events, everything there is, and what is known from before.

    `cut` names journals whose beginning is missing; `unseen` the columns nobody wrote.
    """

    new: DataFrame
    all: DataFrame
    carried: DataFrame | None = None
    cut: Sequence[str] = ()
    unseen: frozenset[str] = frozenset()
    quiesced: bool = False


class Audit:
    """Steps of one audit over one history; results are read from its attributes, then `close`."""

    def __init__(self, spark: SparkSession, history: History) -> None:
        self._history = history
        parts = proof(history.new, Steps(spark), cut=history.cut)
        if history.carried is not None:
            parts = merged(parts.select(*history.carried.columns).unionByName(history.carried))
        self.proofs = parts.withColumn("open_question", unproven(quiesced=history.quiesced))
        self.proofs = self.proofs.persist(StorageLevel.DISK_ONLY)
        self._counts = self._count()
        self.violations = self._find().persist(StorageLevel.MEMORY_AND_DISK)

    def close(self) -> None:
        """Let go of what is kept between the steps."""
        self.proofs.unpersist()
        self.violations.unpersist()

    def carry(self) -> DataFrame:
        """What the next audit must know of this one: jobs that have not ended, or are in doubt."""
        going_on = ~has_ended() & (F.col("n") > 0)
        return self.proofs.where(going_on).drop("open_question")

    def result(self) -> Audited:
        """The summary."""
        found = {
            (row.invariant, row.contract): row["count"]
            for row in self.violations.groupBy("invariant", "contract").count().collect()
        }
        jobs = {CONTRACTS[row.code]: row.jobs for row in self._counts if row.code >= 0}
        strange = {contract: n for (number, contract), n in found.items() if number == UNOBSERVED}
        verdicts = [self._verdict(each, jobs, found, strange) for each in INVARIANTS]
        return Audited(
            events=sum(row.events for row in self._counts),
            jobs=sum(row.jobs for row in self._counts),
            open_jobs=sum(row.open_jobs for row in self._counts),
            begins_late=sum(row.begins_late for row in self._counts),
            looked_at=sum(row.looked_at for row in self._counts),
            verdicts=verdicts,
        )

    def _verdict(
        self,
        invariant: Invariant,
        jobs: dict[str, int],
        found: dict[tuple[str, str], int],
        strange: dict[str, int],
    ) -> Verdict:
        asked = {name: n for name, n in jobs.items() if name in invariant.contracts}
        blind = not self._sees(invariant)
        return Verdict(
            invariant=invariant.number,
            text=invariant.text,
            contracts=applies_to(invariant),
            jobs=sum(asked.values()),
            violations=sum(n for (number, _), n in found.items() if number == invariant.number),
            unobserved=sum(n if blind else strange.get(name, 0) for name, n in asked.items()),
        )

    def _sees(self, invariant: Invariant) -> bool:
        return not self._history.unseen & set(invariant.needs)

    def _count(self) -> list[Row]:
        late = (F.col("min_ver") > 1) & (F.col("cut") == 1)
        counted = (
            self.proofs.where(F.col("n") > 0)
            .groupBy("code")
            .agg(
                F.count("*").alias("jobs"),
                F.sum("n").alias("events"),
                F.count(F.when(~has_ended(), 1)).alias("open_jobs"),
                F.count(F.when(late, 1)).alias("begins_late"),
                F.count(F.when(F.col("open_question"), 1)).alias("looked_at"),
            )
        )
        return counted.collect()

    def _find(self) -> DataFrame:
        history = self._history
        suspects = self.proofs.where(F.col("open_question"))
        found = explain(self._events_of(suspects), quiesced=history.quiesced)
        found = found.unionByName(lines.claimed_while_paused(history.all))
        found = found.unionByName(self._overtaken())
        late = self._events_of(self.proofs.where(lines.is_late(F.col("flags"))))
        found = found.unionByName(lines.late_clock(late.where(lines.is_behind())))
        shown = [i.number for i in INVARIANTS if self._sees(i)]
        return found.where(F.col("invariant").isin(*shown, UNOBSERVED))

    def _overtaken(self) -> DataFrame:
        return lines.explain_overtaken(self._history.all, lines.overtaken(self.proofs))

    def _events_of(self, jobs: DataFrame) -> DataFrame:
        """All events of some jobs, with whether their journal is whole."""
        events = self._history.all
        for name, column in job_keys().items():
            events = events.withColumn(name, column)
        some = jobs.select(*KEYS, (F.col("cut") == 0).alias("whole"))
        return events.join(some, list(KEYS)).select(*NAMES, "whole")


def completed(rows: DataFrame) -> tuple[DataFrame, frozenset[str]]:
    """A history file made fit: what is missing is derived from order, or named as not seen.

    Columns that are null throughout were not written. The number of an event, and what its writer
    saw, follow from the events before it; but then they prove nothing, so that the invariants which
    need them are not judged.
    """
    present = rows.agg(*(F.count(name).alias(name) for name in NAMES)).collect()[0].asDict()
    unseen = frozenset(name for name in NAMES if not present[name])
    by = "pos" if present["pos"] else "ts_ms"
    order = Window.partitionBy("journal", "contract", "queue", "job_id").orderBy(by, "seq")
    derived = {
        "ver": F.row_number().over(order),
        "from_state": F.coalesce(F.lag("to_state").over(order), F.lit("")),
        "prev_fence": F.coalesce(F.lag("fence").over(order), F.lit(0)),
        "prev_lease_until_ms": F.coalesce(F.lag("lease_until_ms").over(order), F.lit(0)),
    }
    if not present["pos"]:
        rows = rows.withColumn("pos", F.col("ts_ms"))
    for name in _DERIVED & unseen:
        rows = rows.withColumn(name, derived[name])
    return rows, unseen
