"""The audit: silent on sound histories, and what is broken is called by its number and its job."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from random import Random

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from tenure.core.journal import JournalEvent
from tenure.pipeline.audit.lakes import audit_lake
from tenure.pipeline.audit.rules import BY_NUMBER, JUDGED
from tenure.pipeline.audit.run import ROW, Audit, Audited, History, completed
from tenure.pipeline.lake import Lake
from tenure.pipeline.schema import ARROW, COLUMNS, OFFSET, rows_of
from tests.chaos.sim.test_verdict import (
    MUTATIONS,
    NotHere,
    a_job_never_ended,
    a_stale_token_is_accepted,
    an_operator_saw_a_claim_while_paused,
    judged,
    sound,
    the_second_in_line_is_first,
    two_events_changed_places,
)
from tests.chaos.sim.world import Recording

# 50 for the whole proof: TENURE_SPARK_MUTANTS=50.
MUTANTS = int(os.environ.get("TENURE_SPARK_MUTANTS", "4"))
SEEDS = 8
# What only clients or a scan of the store saw, or the order in which events were handed in.
ELSEWHERE = {
    "an_acknowledged_job_is_nowhere",
    "a_stale_settle_is_acknowledged",
    "a_resent_settle_is_refused",
    an_operator_saw_a_claim_while_paused.__name__,
    two_events_changed_places.__name__,
}


def frame(spark: SparkSession, histories: dict[str, list[JournalEvent]]) -> DataFrame:
    """Histories as rows."""
    return spark.createDataFrame(pa.Table.from_batches([page(histories)]))


def page(histories: dict[str, list[JournalEvent]]) -> pa.RecordBatch:
    """Histories side by side, each under its own name, in the order in which they are given."""
    rows = [
        {"journal": name, "pos": at + 1} | msgspec.structs.asdict(event)
        for name, events in histories.items()
        for at, event in enumerate(events)
    ]
    return pa.RecordBatch.from_pylist(rows, ARROW)


def audited(
    spark: SparkSession, events: DataFrame, **how: bool
) -> tuple[Audited, dict[str, dict[str, set[str]]]]:
    """The summary, and by history and number the jobs that were found."""
    history = History(new=events, all=lambda: events, quiesced=how.get("quiesced", True))
    audit = Audit(spark, history)
    try:
        found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for row in audit.violations.collect():
            assert row.invariant == "I24" or row.evidence != "[]"
            found[row.journal][row.invariant].add(row.job_id)
        return audit.result(), found
    finally:
        audit.close()


def test_sound_histories_raise_no_alarm_and_nothing_needs_a_closer_look(
    spark: SparkSession,
) -> None:
    events = frame(spark, {f"s{seed}": sound(seed).events for seed in range(SEEDS)})
    result, found = audited(spark, events)
    assert not found
    assert result.violations == 0
    assert result.looked_at == 0
    assert result.jobs == sum(judged(sound(seed)).jobs for seed in range(SEEDS))
    for each in (verdict for verdict in result.verdicts if verdict.jobs):
        assert (each.mark, each.unobserved) == ("sound", 0), each


def mutants() -> dict[str, tuple[str, Recording, Recording]]:
    made: dict[str, tuple[str, Recording, Recording]] = {}
    for number, mutations in MUTATIONS.items():
        if number not in BY_NUMBER:
            continue
        for mutation in mutations:
            if mutation.__name__ in ELSEWHERE:
                continue
            count = 0
            for attempt in range(12 * MUTANTS):
                rng = Random(f"{number}/{mutation.__name__}/{attempt}")
                before = sound(attempt % SEEDS)
                try:
                    after = mutation(before, rng)
                except NotHere:
                    continue
                made[f"{number}/{mutation.__name__}/{attempt}"] = number, before, after
                count += 1
                if count == MUTANTS:
                    break
            assert count == MUTANTS, mutation.__name__
    return made


def test_every_kind_of_damage_is_found_in_its_job_and_called_by_its_number(
    spark: SparkSession,
) -> None:
    made = mutants()
    # These have tests of their own: what the simulator writes has no time in its places, and tells
    # no receiver.
    wanted = {each.number for each in JUDGED} - {"I28", "I35"}
    assert {number for number, _, _ in made.values()} == wanted
    events = frame(spark, {name: after.events for name, (_, _, after) in made.items()})
    result, found = audited(spark, events)
    missed = [name for name, (number, _, _) in made.items() if number not in found[name]]
    assert not missed
    for name, (_, _, after) in made.items():
        # The journal is all that is looked at here, so what only others saw is left out there too.
        told = judged(msgspec.structs.replace(after, observations=[], snapshot=None))  # type: ignore[arg-type]
        by_hand: dict[str, set[str]] = defaultdict(set)
        for violation in told.violations:
            by_hand[violation.invariant].add(violation.job_id)
        assert found[name] == by_hand, name
    assert result.violations > 0
    assert {each.invariant for each in result.verdicts if each.violations} == wanted


def _with_two_in_line() -> Recording:
    """A history with two jobs of one priority, of which the second could be claimed first."""
    for seed in range(20):
        with contextlib.suppress(NotHere):
            the_second_in_line_is_first(sound(seed), Random(1))
            return sound(seed)
    raise AssertionError("none of twenty histories has two such jobs")


def test_an_overtaking_among_jobs_that_are_otherwise_sound_is_found(spark: SparkSession) -> None:
    after = the_second_in_line_is_first(_with_two_in_line(), Random(1))
    result, found = audited(spark, frame(spark, {"a": after.events, "b": sound(2).events}))
    assert result.looked_at == 0
    by_hand = {each.job_id for each in judged(after).violations if each.invariant == "I22"}
    assert by_hand
    assert found == {"a": {"I22": by_hand}}


def test_a_clock_that_went_back_is_noticed(spark: SparkSession) -> None:
    at = 1_700_000_000_000
    first = JournalEvent(
        seq=f"{at}-0.0", contract="streams", queue="q", job_id="j", type="submit", ts_ms=at,
        ver=1, to_state="queued",
    )  # fmt: skip
    second = JournalEvent(
        seq=f"{at + 9}-0.0", contract="streams", queue="q", job_id="j", type="claim",
        ts_ms=at - 5_000, ver=2, from_state="queued", to_state="running", attempt=1, fence=1,
        lease_until_ms=at + 9,
    )  # fmt: skip
    rows = frame(spark, {"a": [first, second]}).withColumnRenamed("pos", "old")
    rows = rows.selectExpr("*", f"bigint({at} + old) << 22 as pos").drop("old")
    _, found = audited(spark, rows, quiesced=False)
    assert found["a"] == {"I35": {"j"}}


def test_the_proof_of_a_part_goes_on_with_the_rest(spark: SparkSession) -> None:
    """In any order: rows of the proof merge."""
    whole = frame(spark, {f"s{seed}": sound(seed).events for seed in range(3)})
    first, rest = (whole.where(f"abs(hash(seq, job_id)) % 3 {which} 0") for which in ("=", "<>"))
    begun = Audit(spark, History(new=first, all=lambda: first))
    try:
        carried = begun.proof.select(*ROW)
        history = History(new=rest, all=lambda: whole, carried=carried, quiesced=True)
        done = Audit(spark, history)
        try:
            assert done.result().violations == 0
            assert done.result().looked_at == 0
            assert done.result().jobs == sum(judged(sound(seed)).jobs for seed in range(3))
        finally:
            done.close()
    finally:
        begun.close()


def append(lake: Lake, events: pa.RecordBatch, after: int) -> int:
    """A part of a history, as capture would leave it; up to which place it reaches."""
    upto = after + len(events)
    told = {"after": after, "upto": upto, "units": len(events)}
    offset = JournalEvent(
        seq=str(upto), contract="", queue="", job_id="", type=OFFSET, ts_ms=0,
        data=msgspec.json.encode(told).decode(),
    )  # fmt: skip
    rows = pa.concat_tables(
        [pa.Table.from_batches([events]), pa.Table.from_batches([rows_of([offset], "old")])],
        promote_options="default",
    )
    lake.events.put_events(rows.cast(ARROW).to_batches())
    return upto


def test_a_lake_is_audited_from_where_the_last_audit_ended(spark: SparkSession, lake: str) -> None:
    place = Lake(lake)
    place.begin()
    broken = a_stale_token_is_accepted(sound(1), Random(1)).events
    events = page({"old": broken})
    first_start = next(at for at, event in enumerate(broken) if event.type == "claim")
    half = append(place, events.slice(0, first_start + 1), 0)
    first = audit_lake(spark, lake)
    assert first.events == sum(event.ver > 0 for event in broken[:half])
    assert first.open_jobs > 0
    assert append(place, events.slice(half), half) == len(events)
    second = audit_lake(spark, lake)
    whole = audit_lake(spark, lake, full=True)
    assert second.events == whole.events == sum(event.ver > 0 for event in broken)
    assert "I8" in second.broken
    assert second.broken == whole.broken
    assert (second.jobs, second.open_jobs) == (whole.jobs, whole.open_jobs)
    assert audit_lake(spark, lake) == whole, "nothing is new"


def test_jobs_that_go_on_are_no_loss_until_all_is_quiet(spark: SparkSession) -> None:
    mutant = a_job_never_ended(sound(1), Random(1))
    events = frame(spark, {"a": mutant.events})
    result, found = audited(spark, events, quiesced=False)
    assert not found
    assert result.open_jobs == 1
    assert audited(spark, events, quiesced=True)[0].broken == ["I1"]


def test_what_another_system_did_not_write_is_not_judged(spark: SparkSession) -> None:
    rows = frame(spark, {"a": sound(1).events}).selectExpr(
        *(
            f"cast(null as {kind}) as {name}"
            if name in ("ver", "prev_fence", "from_state", "lease_until_ms", "prev_lease_until_ms")
            else name
            for name, kind in COLUMNS
        )
    )
    history, unseen = completed(rows.where("type not in ('reject', 'pause', 'resume')"))
    audit = Audit(spark, History(new=history, all=lambda: history, unseen=unseen, quiesced=True))
    try:
        result = audit.result()
        by_number = {each.invariant: each for each in result.verdicts}
        assert result.violations == 0, audit.violations.collect()
        assert by_number["I10"].mark == by_number["I4"].mark == "not seen"
        assert by_number["I13"].mark == "sound"
    finally:
        audit.close()


def test_every_promise_that_is_judged_names_the_columns_it_needs() -> None:
    for each in BY_NUMBER.values():
        assert each.needs
        assert set(each.needs) <= {name for name, _ in COLUMNS}
