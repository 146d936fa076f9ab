"""The checker checked: silent on sound histories, and every kind of damage is called by its number.

Each mutation below takes a sound history and breaks exactly one promise in it, somewhere. Fifty of
each are made; all must be found.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import msgspec
import pytest

from tenure.core.job import JobRecord
from tenure.core.journal import JournalEvent
from tests.chaos.sim.world import Recording, record
from tests.chaos.verdict import (
    BY_HOLDER,
    INVARIANTS,
    Observation,
    Snapshot,
    Verdict,
    Violation,
    check,
)

MUTANTS = 50
SOUND_SEEDS = 12
FINAL = ("done", "failed", "cancelled")

Mutation = Callable[[Recording, Random], Recording]
MUTATIONS: dict[str, list[Mutation]] = {}

change = msgspec.structs.replace


@cache
def sound(seed: int) -> Recording:
    return record(seed)


def judged(made: Recording) -> Verdict:
    return check(made.events, observations=made.observations, snapshot=made.snapshot)


def breaks(*numbers: str) -> Callable[[Mutation], Mutation]:
    def register(mutation: Mutation) -> Mutation:
        for number in numbers:
            MUTATIONS.setdefault(number, []).append(mutation)
        return mutation

    return register


class NotHere(Exception):
    """This history has no place where the mutation could be made."""


def pick(rng: Random, made: Recording, *types: str, where: Any = None) -> int:
    """The position of a random event of one of the types."""
    places = [
        at
        for at, event in enumerate(made.events)
        if event.type in types and (where is None or where(event))
    ]
    if not places:
        raise NotHere
    return rng.choice(places)


def edited(made: Recording, at: int, **fields: Any) -> Recording:
    events = list(made.events)
    events[at] = change(events[at], **fields)
    return change(made, events=events)


def dropped(made: Recording, at: int) -> Recording:
    return change(made, events=[*made.events[:at], *made.events[at + 1 :]])


def inserted(made: Recording, at: int, *events: JournalEvent) -> Recording:
    return change(made, events=[*made.events[:at], *events, *made.events[at:]])


def renumbered(made: Recording, job_id: str) -> Recording:
    """Hide a dropped or added event: give the job's events their `ver` anew."""
    ver, events = 0, []
    for event in made.events:
        if event.job_id == job_id and event.ver:
            ver += 1
            event = change(event, ver=ver)
        events.append(event)
    return change(made, events=events)


def last_of(made: Recording, job_id: str) -> JournalEvent:
    return [event for event in made.events if event.job_id == job_id and event.ver][-1]


# --- mutations -------------------------------------------------------------------------------


@breaks("I1")
def a_job_never_ended(made: Recording, rng: Random) -> Recording:
    return dropped(made, pick(rng, made, "complete", "bury", where=lambda e: e.to_state in FINAL))


@breaks("I1")
def an_acknowledged_job_is_nowhere(made: Recording, rng: Random) -> Recording:
    seen = Observation(op="submit", result="ok", begin_ms=1, end_ms=2, job_id="vanished")
    return change(made, observations=[*made.observations, seen])


@breaks("I3")
def a_running_job_has_no_lease(made: Recording, rng: Random) -> Recording:
    return edited(made, pick(rng, made, "claim", "extend"), lease_until_ms=0)


@breaks("I3")
def a_lease_was_over_when_it_was_taken(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "claim")
    return edited(made, at, lease_until_ms=made.events[at].ts_ms - rng.randrange(1_000))


@breaks("I3")
def a_waiting_job_has_a_lease(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "submit", "retry", "reap")
    return edited(made, at, lease_until_ms=made.events[at].ts_ms + 5)


@breaks("I4")
def an_event_is_missing(made: Recording, rng: Random) -> Recording:
    return dropped(made, pick(rng, made, "claim", "reap", "retry", "submit"))


@breaks("I4")
def an_event_stands_twice(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "claim", "complete", "submit", "extend")
    return inserted(made, at, made.events[at])


@breaks("I4")
def two_events_changed_places(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "claim")
    events = list(made.events)
    mine = [n for n, event in enumerate(events) if event.job_id == events[at].job_id and event.ver]
    before = mine[mine.index(at) - 1]
    events[at], events[before] = events[before], events[at]
    return change(made, events=events)


@breaks("I4")
def a_step_is_not_in_the_table(made: Recording, rng: Random) -> Recording:
    return edited(made, pick(rng, made, "claim"), type="complete", to_state="waiting")


@breaks("I4")
def a_writer_saw_another_fence(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, *BY_HOLDER)
    return edited(made, at, prev_fence=made.events[at].prev_fence + 1)


@breaks("I5")
def a_finished_job_goes_on(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "complete")
    end = made.events[at]
    more = change(end, type="retry", ver=end.ver + 1, from_state="done", to_state="waiting")
    return inserted(made, at + 1, more)


@breaks("I6")
def a_claim_skips_a_fence(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "claim")
    return edited(made, at, fence=made.events[at].fence + 1)


@breaks("I6")
def a_claim_keeps_the_old_fence(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "claim", where=lambda e: e.fence > 1)
    return edited(made, at, fence=made.events[at].fence - 1)


@breaks("I7")
def two_hold_one_job(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "reap", where=lambda e: _next_worker(made, e))
    return renumbered(dropped(made, at), made.events[at].job_id)


@breaks("I8")
def a_stale_token_is_accepted(made: Recording, rng: Random) -> Recording:
    return edited(made, pick(rng, made, *BY_HOLDER), token_h="0123456789abcdef")


@breaks("I8")
def another_worker_writes(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "complete", "retry", "report")
    return edited(made, at, worker_id="worker-of-old")


@breaks("I8")
def a_stale_settle_is_acknowledged(made: Recording, rng: Random) -> Recording:
    reap = made.events[pick(rng, made, "reap")]
    if last_of(made, reap.job_id).fence == reap.fence:
        raise NotHere
    seen = Observation(
        op="settle",
        result="ok",
        begin_ms=1,
        end_ms=2,
        job_id=reap.job_id,
        fence=reap.fence,
        kind="complete",
        answer="Completed",
    )
    return change(made, observations=[*made.observations, seen])


@breaks("I10")
def a_lease_is_reaped_too_early(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "reap")
    return edited(made, at, ts_ms=made.events[at].prev_lease_until_ms - 1 - rng.randrange(500))


def _next_worker(made: Recording, reap: JournalEvent) -> str:
    after = [e for e in made.events if e.job_id == reap.job_id and e.ver == reap.ver + 1]
    return after[0].worker_id if after and after[0].type == "claim" else ""


@breaks("I11")
def an_extend_shortens_the_lease(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "extend")
    before_ms = made.events[at].prev_lease_until_ms
    return edited(made, at, lease_until_ms=before_ms - 1 - rng.randrange(100))


@breaks("I11")
def a_stranger_extends(made: Recording, rng: Random) -> Recording:
    return edited(made, pick(rng, made, "extend"), token_h="feedfeedfeedfeed")


@breaks("I12")
def a_job_completes_twice(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "complete", "bury")
    end = made.events[at]
    again = change(end, ver=end.ver + 1, type="complete", to_state="done", from_state=end.to_state)
    return inserted(made, at + 1, again)


@breaks("I12")
def a_resent_settle_is_refused(made: Recording, rng: Random) -> Recording:
    end = made.events[pick(rng, made, "complete")]
    seen = Observation(
        op="settle",
        result="ok",
        begin_ms=1,
        end_ms=2,
        node=end.worker_id,
        job_id=end.job_id,
        fence=end.fence,
        kind="complete",
        answer="LeaseLost",
        result_h=end.result_h,
    )
    return change(made, observations=[*made.observations, seen])


@breaks("I13")
def a_start_is_not_counted(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "claim")
    return edited(made, at, attempt=made.events[at].attempt - 1)


@breaks("I13")
def a_job_starts_too_often(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "claim")
    return edited(made, at, attempt=made.events[at].max_attempts + 1)


@breaks("I4", "I14")
def a_running_job_is_promoted(made: Recording, rng: Random) -> Recording:
    """A job waits again and starts again, though it did not fail and nobody lost or returned it."""
    at = pick(rng, made, "retry", "reap", where=lambda e: _next_worker(made, e))
    return edited(made, at, type="promote")


@breaks("I14")
def a_job_starts_again_for_no_reason(made: Recording, rng: Random) -> Recording:
    """The same start once more, and nothing between the two."""
    at = pick(rng, made, "claim")
    first = made.events[at]
    return renumbered(inserted(made, at + 1, change(first, fence=first.fence + 1)), first.job_id)


def _retyped(*was: str, to: str) -> Mutation:
    """A step that the table has, by an event of a kind that never makes it."""

    def mutation(made: Recording, rng: Random) -> Recording:
        return edited(made, pick(rng, made, *was), type=to)

    mutation.__name__ = f"a_{'_or_'.join(was)}_is_called_{to}"
    return breaks("I4")(mutation)


for _was, _to in {
    "retry": ("complete", "bury", "cancel", "expire", "claim"),
    "reap": ("complete", "promote", "expire"),
    "complete": ("bury", "cancel", "reap", "retry", "promote", "expire"),
    "bury": ("complete", "retry", "snooze", "release", "promote"),
    "claim": ("promote", "reap", "expire"),
}.items():
    for _each in _to:
        _retyped(_was, to=_each)


@breaks("I16")
def an_acknowledged_end_is_not_in_the_journal(made: Recording, rng: Random) -> Recording:
    end = made.events[pick(rng, made, "complete")]
    seen = Observation(
        op="settle",
        result="ok",
        begin_ms=1,
        end_ms=2,
        job_id=end.job_id,
        fence=end.fence,
        kind="bury",
        answer="Buried",
    )
    return change(made, observations=[*made.observations, seen])


def _scan(made: Recording, records: list[JobRecord]) -> Recording:
    return change(made, snapshot=change(made.snapshot, records=records))


@breaks("I17")
def the_store_forgot_a_job(made: Recording, rng: Random) -> Recording:
    records = list(made.snapshot.records)
    del records[rng.randrange(len(records))]
    return _scan(made, records)


@breaks("I17")
def the_store_made_up_a_job(made: Recording, rng: Random) -> Recording:
    records = list(made.snapshot.records)
    return _scan(made, [*records, change(rng.choice(records), job_id="made-up")])


@breaks("I18")
def the_last_word_of_a_job_is_missing(made: Recording, rng: Random) -> Recording:
    told = dict(made.snapshot.events)
    job_id = rng.choice(sorted(told))
    told[job_id] = told[job_id][:-1]
    return change(made, snapshot=change(made.snapshot, events=told))


@breaks("I18")
def a_job_says_its_end_twice(made: Recording, rng: Random) -> Recording:
    told = dict(made.snapshot.events)
    job_id = rng.choice(sorted(told))
    end = told[job_id][-1]
    told[job_id] = (*told[job_id], change(end, event_id=str(int(end.event_id) + 1)))
    return change(made, snapshot=change(made.snapshot, events=told))


@breaks("I18")
def a_jobs_own_events_are_out_of_order(made: Recording, rng: Random) -> Recording:
    told = dict(made.snapshot.events)
    job_id = rng.choice(sorted(told))
    told[job_id] = (*told[job_id][1:-1], told[job_id][0], told[job_id][-1])
    if len(told[job_id]) < 3:
        raise NotHere
    return change(made, snapshot=change(made.snapshot, events=told))


@breaks("I19")
def the_store_says_another_state(made: Recording, rng: Random) -> Recording:
    records = list(made.snapshot.records)
    at = rng.randrange(len(records))
    field, value = rng.choice([("state", "running"), ("fence", 99), ("attempt", 77)])
    records[at] = change(records[at], **{field: value})
    return _scan(made, records)


@breaks("I22")
def the_second_in_line_is_first(made: Recording, rng: Random) -> Recording:
    """A later job claimed before an earlier one of the same priority, both without delay."""
    firsts = [
        (at, event)
        for at, event in enumerate(made.events)
        if event.type == "claim" and event.fence == 1 and _plain_submit(made, event)
    ]
    pairs = [
        (early, late)
        for n, (early, one) in enumerate(firsts)
        for late, two in firsts[n + 1 :]
        if one.priority == two.priority
        and late > early
        # The later claim moves before the earlier one, but not before its own submit.
        and made.events.index(_submit_of(made, two)) < early
    ]
    if not pairs:
        raise NotHere
    early, late = rng.choice(pairs)
    events = list(made.events)
    events.insert(early, events.pop(late))
    return change(made, events=events)


def _submit_of(made: Recording, event: JournalEvent) -> JournalEvent:
    return next(e for e in made.events if e.type == "submit" and e.job_id == event.job_id)


def _plain_submit(made: Recording, event: JournalEvent) -> bool:
    return not _submit_of(made, event).due_ms


@breaks("I24")
def a_paused_queue_hands_out_a_lease(made: Recording, rng: Random) -> Recording:
    at = pick(rng, made, "claim")
    claim = made.events[at]
    pause = JournalEvent(
        seq="0", contract="memory", queue="sim", job_id="", type="pause", ts_ms=claim.ts_ms
    )
    return inserted(made, at, pause)


@breaks("I24")
def an_operator_saw_a_claim_while_paused(made: Recording, rng: Random) -> Recording:
    claim = made.events[pick(rng, made, "claim")]
    around = {"begin_ms": claim.ts_ms - 9, "end_ms": claim.ts_ms - 5}
    after = {"begin_ms": claim.ts_ms + 5, "end_ms": claim.ts_ms + 9}
    seen = [
        Observation(op="pause", result="ok", **around),
        Observation(op="resume", result="ok", **after),
    ]
    return change(made, observations=[*made.observations, *seen])


@breaks("I36")
def the_counts_do_not_add_up(made: Recording, rng: Random) -> Recording:
    counts = made.snapshot.counts
    assert counts is not None
    state = rng.choice(sorted(counts.states))
    states = counts.states | {state: counts.states[state] + 1}
    return change(made, snapshot=change(made.snapshot, counts=change(counts, states=states)))


# --- the claims ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SOUND_SEEDS))
def test_a_sound_history_raises_no_alarm(seed: int) -> None:
    verdict = judged(sound(seed))
    assert verdict.ok, str(verdict)
    assert verdict.events > 30


def test_every_invariant_has_a_mutation() -> None:
    assert set(MUTATIONS) == set(INVARIANTS)


@pytest.mark.parametrize(
    ("number", "mutation"),
    [
        pytest.param(number, mutation, id=f"{number}-{mutation.__name__}")
        for number, mutations in MUTATIONS.items()
        for mutation in mutations
    ],
)
def test_damage_is_found_and_called_by_its_number(number: str, mutation: Mutation) -> None:
    made = 0
    for attempt in range(4 * MUTANTS):
        rng = Random(f"{number}/{mutation.__name__}/{attempt}")
        try:
            mutant = mutation(sound(attempt % SOUND_SEEDS), rng)
        except NotHere:
            continue
        verdict = judged(mutant)
        assert number in verdict.broken, f"seed {attempt}: found only {verdict}"
        made += 1
        if made == MUTANTS:
            return
    pytest.fail(f"only {made} of {MUTANTS} mutants could be made")


def test_a_violation_shows_the_events_that_prove_it() -> None:
    mutant = a_stale_token_is_accepted(sound(1), Random(1))
    (violation, *_) = judged(mutant).violations
    assert isinstance(violation, Violation)
    assert violation.evidence
    assert violation.invariant in str(violation)
    assert "0123456789abcdef" in str(violation)


def test_a_trimmed_journal_is_checked_from_where_it_begins() -> None:
    taken_as_whole: set[str] = set()
    for seed in range(1, 6):
        made = sound(seed)
        kept = made.events[len(made.events) // 3 :]
        assert check(kept, whole=False, quiesced=False).broken <= {"I22"}
        taken_as_whole |= check(kept, quiesced=False).broken
    assert "I4" in taken_as_whole


def test_an_empty_history_is_sound() -> None:
    assert check([]).ok
    assert check([], snapshot=Snapshot(records=[])).ok


def test_a_hundred_thousand_events_take_seconds_not_minutes() -> None:
    events: list[JournalEvent] = []
    base = sound(1).events
    while len(events) < 100_000:
        batch = len(events)
        events += [
            change(event, job_id=f"{event.job_id}/{batch}") for event in base if event.job_id
        ]
    began_s = time.perf_counter()
    verdict = check(events)
    assert verdict.ok, str(verdict)
    assert time.perf_counter() - began_s < 6
