"""One audit: prove, explain what was not proven, look at the lines, sum up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812
from pyspark.storagelevel import StorageLevel

from leasehold.pipeline.audit import lines
from leasehold.pipeline.audit.explain import UNOBSERVED, VIOLATIONS_DDL, explain
from leasehold.pipeline.audit.invariants import INVARIANTS, Invariant, applies_to
from leasehold.pipeline.audit.proof import (
    CONTRACTS,
    KEYS,
    LATE_CLOCK,
    PAUSES,
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
    """What an audit found. `open_jobs` have not ended, `looked_at` the proof alone did not settle.

    `begins_late` are jobs whose first events are missing because their journal is cut.
    """

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
        self._nothing = spark.createDataFrame([], VIOLATIONS_DDL)
        parts = proof(history.new, Steps(spark), cut=history.cut)
        if history.carried is not None:
            parts = merged(parts.select(*history.carried.columns).unionByName(history.carried))
        self.proofs = parts.withColumn("open_question", unproven(quiesced=history.quiesced))
        self.proofs = self.proofs.persist(StorageLevel.MEMORY_AND_DISK)
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

    def counts(self) -> dict[str, Row]:
        """By contract: `jobs`, `events`, and of these `open_jobs`, `open_events`, `again`.

        `again` are jobs without their first events in a journal that is whole: an earlier audit
        saw them end.
        """
        return {CONTRACTS[row.code]: row for row in self._counts if row.code >= 0}

    def result(self) -> Audited:
        """The summary of this audit alone."""
        jobs = {name: row.jobs for name, row in self.counts().items()}
        return Audited(
            events=sum(row.events for row in self._counts),
            jobs=sum(row.jobs for row in self._counts),
            open_jobs=sum(row.open_jobs for row in self._counts),
            begins_late=sum(row.begins_late for row in self._counts),
            looked_at=sum(row.looked_at for row in self._counts),
            verdicts=self.verdicts(jobs),
        )

    def verdicts(self, jobs: Mapping[str, int]) -> list[Verdict]:
        """What came of each invariant, asked of so many jobs of each contract."""
        found = {
            (row.invariant, row.contract): row["count"]
            for row in self.violations.groupBy("invariant", "contract").count().collect()
        }
        strange = {contract: n for (number, contract), n in found.items() if number == UNOBSERVED}
        return [self._verdict(each, jobs, found, strange) for each in INVARIANTS]

    def _verdict(
        self,
        invariant: Invariant,
        jobs: Mapping[str, int],
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
        counted = self.proofs.groupBy("code").agg(
            F.count(F.when(F.col("n") > 0, 1)).alias("jobs"),
            F.sum("n").alias("events"),
            F.count(F.when((F.col("n") > 0) & ~has_ended(), 1)).alias("open_jobs"),
            F.sum(F.when(~has_ended(), F.col("n")).otherwise(F.lit(0))).alias("open_events"),
            F.count(F.when((F.col("min_ver") > 1) & (F.col("cut") == 0), 1)).alias("again"),
            F.count(F.when(late, 1)).alias("begins_late"),
            F.count(F.when(F.col("open_question"), 1)).alias("looked_at"),
            F.count(F.when(lines.has(LATE_CLOCK), 1)).alias("late"),
            F.count(F.when(lines.has(PAUSES), 1)).alias("pauses"),
            F.min("submit_pos").alias("first_pos"),
            F.max("submit_pos").alias("last_pos"),
        )
        return counted.collect()

    def _find(self) -> DataFrame:
        """Only what the proof leaves open is looked for in the events once more."""
        history = self._history
        found = [self._nothing]
        if any(row.looked_at for row in self._counts):
            suspects = self.proofs.where(F.col("open_question"))
            found.append(explain(self._events_of(suspects), quiesced=history.quiesced))
        if any(row.late for row in self._counts):
            late = self._events_of(self.proofs.where(lines.has(LATE_CLOCK)))
            found.append(lines.late_clock(late.where(lines.is_behind())))
        if any(row.pauses for row in self._counts):
            found.append(lines.claimed_while_paused(history.all))
        found += self._overtaken()
        shown = [i.number for i in INVARIANTS if self._sees(i)]
        every = reduce(lambda one, other: one.unionByName(other), found)
        return every.where(F.col("invariant").isin(*shown, UNOBSERVED))

    def _overtaken(self) -> list[DataFrame]:
        places = [(row.first_pos, row.last_pos) for row in self._counts if row.last_pos is not None]
        if not places:
            return []
        first, last = min(p[0] for p in places), max(p[1] for p in places)
        jobs = lines.overtaken(self.proofs, first, last)
        if jobs.isEmpty():
            return []
        return [lines.explain_overtaken(self._history.all, jobs)]

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
