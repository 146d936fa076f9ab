"""One audit: prove, explain what was not proven, check the order of claims, summarize."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812
from pyspark.storagelevel import StorageLevel

from tenure.pipeline.audit.explain import (
    KEYS,
    NOT_HERE,
    UNOBSERVED,
    VIOLATIONS_DDL,
    are_mixed,
    claimed_while_paused,
    explain,
    explain_overtaken,
    gone_back,
    is_behind,
    keyed,
    late_clock,
    overtaken,
)
from tenure.pipeline.audit.rules import (
    CONTRACTS,
    JUDGED,
    STEP_NUMBERS,
    TELLING,
    Invariant,
    applies_to,
    known_steps,
    marks_of,
)
from tenure.pipeline.lake import filled
from tenure.pipeline.schema import NAMES
from tenure.store.files import package_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROW = (
    *("line_h", "job_h", "n", "hi", "x"),
    *("max_pos", "last_pos", "flags", "submit_pos", "claim_pos"),
)
NEEDED = (
    *("journal", "contract", "queue", "type", "from_state", "to_state", "worker_id", "job_id"),
    *("token_h", "pos", "ts_ms", "ver", "attempt", "fence", "prev_fence", "lease_until_ms"),
    *("prev_lease_until_ms", "priority", "due_ms", "max_attempts"),
)
_SUMS = (
    *("jobs", "events", "open_jobs", "open_events"),
    *("again", "begins_late", "looked_at", "strange"),
)
_COUNTED = (*_SUMS, "late", "pauses")
_CODE_MASK = 0xFFFFFF
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


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of one contract ("": not known), and of these some.

    `again` are jobs whose first events are missing although their journal is complete: an earlier
    audit saw them end. `looked_at` were not proven. `strange` ones were submitted by another
    program, which wrote no event.
    """

    contract: str
    jobs: int
    events: int
    open_jobs: int
    open_events: int
    again: int
    begins_late: int
    looked_at: int
    strange: int
    late: bool
    pauses: bool


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What is audited: new events, all events, and the results of earlier audits.

    `all` returns the rows of all events; it is called only if the proof leaves something open.
    `cut` names journals whose beginning is missing, `unseen` the columns that are empty. `outbox`
    are all events of outboxes, if there are any, and
    `checked_upto` the positions up to which an earlier audit checked them.
    """

    new: DataFrame
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
        # Not kept by Spark: whoever asks for it again has it made again.
        self.proof = _proof(spark, history)
        self.proof.createOrReplaceTempView("proof")
        summary = spark.sql(_sql("summary"), args={"quiesced": history.quiesced})
        self._summary = summary.persist(StorageLevel.MEMORY_AND_DISK)
        self._counts = self._counted()
        self.is_clean = True
        self.violations = self._find(spark).persist(StorageLevel.MEMORY_AND_DISK)
        self._found = self._tally()

    def close(self) -> None:
        """Free the data that Spark holds between the steps."""
        self._summary.unpersist()
        self.violations.unpersist()

    def carry(self) -> DataFrame:
        """What the next audit needs of this one: the rows of jobs that have not ended."""
        return self._jobs("not has_ended and n > 0").select(*ROW)

    def counts(self) -> dict[str, Counts]:
        """By contract."""
        return {row.contract: row for row in self._counts if row.contract}

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
        return [self._verdict(each, jobs) for each in JUDGED]

    def _verdict(self, invariant: Invariant, jobs: Mapping[str, int]) -> Verdict:
        asked = {name: n for name, n in jobs.items() if name in invariant.contracts}
        lacks_outbox = invariant.contracts == TELLING and self._history.outbox is None
        blind = lacks_outbox or not self._sees(invariant)
        return Verdict(
            invariant=invariant.number,
            text=invariant.text,
            contracts=applies_to(invariant),
            jobs=sum(asked.values()),
            violations=sum(
                n for (number, _), n in self._found.items() if number == invariant.number
            ),
            unobserved=sum(n if blind else self._strangers(name) for name, n in asked.items()),
            reason=NOT_HERE if lacks_outbox else "",
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

    def _jobs(self, condition: str) -> DataFrame:
        return self._summary.where("job_h is not null").where(condition)

    def _counted(self) -> list[Counts]:
        sums = [F.sum(name).cast("bigint").alias(name) for name in _SUMS]
        code = F.shiftright(F.col("flags"), 8).bitwiseAND(F.lit(_CODE_MASK)).alias("code")
        late = F.max(F.col("flags").bitwiseAND(F.lit(2)) != 0).alias("late")
        pauses = F.max(F.col("flags").bitwiseAND(F.lit(4)) != 0).alias("pauses")
        rows = self._summary.withColumnRenamed("n", "events").groupBy(code).agg(*sums, late, pauses)
        return [
            Counts(contract=_contract(row.code), **{name: row[name] for name in _COUNTED})
            for row in rows.collect()
        ]

    def _find(self, spark: SparkSession) -> DataFrame:
        """Read the events again only for what the proof leaves open."""
        history = self._history
        found = []
        if any(row.looked_at for row in self._counts):
            suspects = self._jobs("open_question")
            found.append(explain(self._events_of(suspects), quiesced=history.quiesced))
        if any(row.late for row in self._counts):
            late = self._events_of(self._jobs("flags & 2 <> 0"))
            found.append(late_clock(late.where(is_behind())))
        if any(row.pauses for row in self._counts):
            found.append(claimed_while_paused(history.all()))
        if history.outbox is not None:
            found.append(gone_back(history.outbox, history.checked_upto))
        if are_mixed(self._summary):
            found.append(explain_overtaken(history.all(), overtaken(self.proof)))
        if not found:
            return spark.createDataFrame([], VIOLATIONS_DDL)
        self.is_clean = False
        shown = [i.number for i in JUDGED if self._sees(i)]
        every = reduce(lambda one, other: one.unionByName(other), found)
        return every.where(F.col("invariant").isin(*shown, UNOBSERVED))

    def _events_of(self, jobs: DataFrame) -> DataFrame:
        """All events of some jobs, with whether their journal is whole."""
        some = jobs.select(*KEYS, F.expr("flags & 16 = 0").alias("whole"))
        events = keyed(self._history.all())
        return events.join(F.broadcast(some), list(KEYS)).select(*NAMES, "whole")


def _proof(spark: SparkSession, history: History) -> DataFrame:
    """One row per job, by `proof.sql`."""
    step_h = F.xxhash64("contract", "type", "from_state", "to_state").alias("step_h")
    steps = spark.createDataFrame(known_steps())
    steps.select(step_h, *STEP_NUMBERS).createOrReplaceTempView("steps")
    empty = ", ".join(f"{name} bigint" for name in ROW)
    carried = history.carried if history.carried is not None else spark.createDataFrame([], empty)
    carried.select(*ROW).createOrReplaceTempView("carried")
    marks = F.lit(0)
    for name in CONTRACTS:
        marks = F.when(F.col("contract") == name, marks_of(name)).otherwise(marks)
    history.new.where("ver is not null").select(
        *NEEDED,
        marks.cast("bigint").alias("contract_marks"),
        (F.col("journal").isin(*history.cut) if history.cut else F.lit(False)).alias("cut"),
    ).createOrReplaceTempView("new_events")
    return spark.sql(_sql("proof"))


@cache
def _sql(name: str) -> str:
    return package_folder("tenure.pipeline.audit").joinpath(f"{name}.sql").read_text()


def _contract(bits: int | None) -> str:
    return CONTRACTS[bits.bit_length() - 1] if bits else ""


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
    return filled(rows), unseen
