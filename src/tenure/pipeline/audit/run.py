"""One audit: prove, explain what was not proven, check the order of claims, summarize."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812
from pyspark.storagelevel import StorageLevel

from tenure.pipeline.audit import lines, parts
from tenure.pipeline.audit.counts import Counts, added
from tenure.pipeline.audit.deliveries import NOT_HERE, gone_back
from tenure.pipeline.audit.explain import UNOBSERVED, VIOLATIONS_DDL, explain
from tenure.pipeline.audit.invariants import INVARIANTS, TELLING, Invariant, applies_to
from tenure.pipeline.audit.lines import has
from tenure.pipeline.audit.order import are_mixed
from tenure.pipeline.audit.proof import CUT, KEYS, LATE_CLOCK, ROW
from tenure.pipeline.audit.read_plan import ReadPlan
from tenure.pipeline.audit.steps import CONTRACTS
from tenure.pipeline.schema import NAMES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_DERIVED = {"ver", "from_state", "prev_fence", "prev_lease_until_ms"}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the summary: an invariant, how many jobs it was checked for, the result."""

    invariant: str
    text: str
    contracts: str
    jobs: int
    violations: int
    unobserved: int
    reason: str = ""

    @property
    def mark(self) -> str:
        """In a word: broken, sound or not seen (`reason` says why no journal shows it)."""
        if self.violations:
            return "BROKEN"
        return "sound" if self.jobs > self.unobserved else "not seen"


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an audit. `open_jobs` have not ended, `looked_at` were not proven.

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
    """What is audited: new events, all events, and the results of earlier audits.

    `new` are files of a lake or rows of events. `all` returns the rows of all events; it is called
    only if the proof leaves something open. `cut` names journals whose beginning is missing,
    `unseen` the columns that are empty. `outbox` are all events of outboxes, if there are any, and
    `checked_upto` the positions up to which an earlier audit checked them.
    """

    new: DataFrame | ReadPlan
    all: Callable[[], DataFrame]
    carried: DataFrame | None = None
    cut: Sequence[str] = ()
    unseen: frozenset[str] = frozenset()
    quiesced: bool = False
    outbox: DataFrame | None = None
    checked_upto: Mapping[str, int] = {}


class Audit:
    """One audit of one history; call `close` after the results have been read."""

    def __init__(self, spark: SparkSession, history: History) -> None:
        self._history = history
        self._nothing = spark.createDataFrame([], VIOLATIONS_DDL)
        self._parts = parts.parts_for(history.new)
        self._packed = parts.packed(spark, history.new, self._parts, history.cut)
        if history.carried is not None:
            carried = parts.packed_proofs(history.carried, self._parts)
            self._packed = self._packed.unionByName(carried)
        judged = parts.judged(self._packed, self._parts, quiesced=history.quiesced)
        self._kept = judged.persist(StorageLevel.MEMORY_AND_DISK)
        summaries = self._kept.where(F.col("what") != parts.JOB).select("what", "rows").collect()
        self._counts = added(row.rows for row in summaries if row.what == parts.COUNTED)
        spans = parts.spans_of(row.rows for row in summaries if row.what == parts.SPANS)
        self._is_mixed = are_mixed(spans)
        self.is_clean = True
        self.violations = self._find().persist(StorageLevel.MEMORY_AND_DISK)
        self._found = self._tally()

    def close(self) -> None:
        """Free the data that Spark holds between the steps."""
        self._kept.unpersist()
        self.violations.unpersist()

    def carry(self) -> DataFrame:
        """What the next audit needs of this one: the rows of jobs that have not ended."""
        return self._jobs(~F.col("has_ended") & (F.col("n") > 0)).select(*ROW)

    def counts(self) -> dict[str, Counts]:
        """By contract."""
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
        """The result for each invariant; `jobs` counts the jobs of each contract."""
        return [self._verdict(each, jobs) for each in INVARIANTS]

    def _verdict(self, invariant: Invariant, jobs: Mapping[str, int]) -> Verdict:
        asked = {name: n for name, n in jobs.items() if name in invariant.contracts}
        lacks_outbox = invariant.contracts == TELLING and self._history.outbox is None
        reason = NOT_HERE if lacks_outbox else invariant.reason
        blind = bool(reason) or not self._sees(invariant)
        strange = {name: self._strangers(name) for name in asked}
        return Verdict(
            invariant=invariant.number,
            text=invariant.text,
            contracts=applies_to(invariant),
            jobs=sum(asked.values()),
            violations=sum(
                n for (number, _), n in self._found.items() if number == invariant.number
            ),
            unobserved=sum(n if blind else strange[name] for name, n in asked.items()),
            reason=reason,
        )

    def _strangers(self, contract: str) -> int:
        """How many jobs have steps of other programs that left no event."""
        row = self.counts().get(contract)
        return self._found.get((UNOBSERVED, contract), 0) + (row.strange if row else 0)

    def _tally(self) -> dict[tuple[str, str], int]:
        if self.is_clean:
            return {}
        counted = self.violations.groupBy("invariant", "contract").count().collect()
        return {(row.invariant, row.contract): row["count"] for row in counted}

    def _sees(self, invariant: Invariant) -> bool:
        return not self._history.unseen & set(invariant.needs)

    def _jobs(self, condition: Column) -> DataFrame:
        return self._kept.where((F.col("what") == parts.JOB) & condition)

    def _find(self) -> DataFrame:
        """Read the events again only for what the proof leaves open."""
        history = self._history
        found = []
        if any(row.looked_at for row in self._counts):
            suspects = self._jobs(F.col("open_question"))
            found.append(explain(self._events_of(suspects), quiesced=history.quiesced))
        if any(row.late for row in self._counts):
            late = self._events_of(self._jobs(has(LATE_CLOCK)))
            found.append(lines.late_clock(late.where(lines.is_behind())))
        if any(row.pauses for row in self._counts):
            found.append(lines.claimed_while_paused(history.all()))
        if history.outbox is not None:
            found.append(gone_back(history.outbox, history.checked_upto))
        found += self._overtaken()
        if not found:
            return self._nothing
        self.is_clean = False
        shown = [i.number for i in INVARIANTS if self._sees(i)]
        every = reduce(lambda one, other: one.unionByName(other), found)
        return every.where(F.col("invariant").isin(*shown, UNOBSERVED))

    def _overtaken(self) -> list[DataFrame]:
        in_doubt = any(row.looked_at and row.in_line for row in self._counts)
        if not in_doubt and not self._is_mixed:
            return []
        found = lines.overtaken(parts.proven(self._packed, self._parts))
        return [lines.explain_overtaken(self._history.all(), found)]

    def _events_of(self, jobs: DataFrame) -> DataFrame:
        """All events of some jobs, with whether their journal is whole."""
        events = lines.keyed(self._history.all())
        some = jobs.select(*KEYS, (~has(CUT)).alias("whole"))
        return events.join(some, list(KEYS)).select(*NAMES, "whole")


def completed(rows: DataFrame) -> tuple[DataFrame, frozenset[str]]:
    """A history file with missing columns derived from the order of events; and their names.

    Columns that are null throughout were not written. The number of an event and the state before
    it are derived from the events before it. Derived values prove nothing, so the invariants that
    need these columns are not checked.
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
