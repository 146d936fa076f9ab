"""The harness's own judgements: each must be able to say no."""

from pathlib import Path
from random import Random

from tenure.core.encoding import short_hash
from tenure.core.journal import JournalEvent
from tests.chaos.effects import Effect, Effects
from tests.chaos.faults import Injected, plan
from tests.chaos.history import STARVED, leases_of, outcomes_lost, recovery_ms, unexplained
from tests.chaos.load import Load, Wanted
from tests.chaos.report import check_ends, check_faults, check_recovery, check_submits

SECOND = 1_000


def event(kind: str, ts_ms: int, *, fence: int = 1, worker: str = "worker1.1-a") -> JournalEvent:
    return JournalEvent(
        seq=f"{ts_ms}-0.0",
        contract="streams",
        queue="jobs:stream",
        job_id="job",
        type=kind,
        ts_ms=ts_ms,
        ver=1,
        fence=fence,
        worker_id=worker,
        to_state={"complete": "done"}.get(kind, "queued"),
    )


HISTORY = [
    event("submit", 1 * SECOND, fence=0, worker=""),
    event("claim", 2 * SECOND),
    event("reap", 4 * SECOND),
    event("claim", 4 * SECOND, fence=2, worker="worker2.1-b"),
    event("complete", 5 * SECOND, fence=2, worker="worker2.1-b"),
]


def kill(worker: str, at_ms: int) -> Injected:
    return Injected(
        kind="kill worker", target=worker, begin_ms=at_ms, end_ms=at_ms, workers=(worker,)
    )


def test_recovery_counts_from_the_kill_to_the_next_claim_of_what_it_hit() -> None:
    hit, missed = kill("worker1.1", 2_500), kill("worker2.1", 2_500)
    assert recovery_ms(HISTORY, [hit, missed], []) == {"kill worker": [1_500]}


def test_time_without_a_store_is_not_counted_as_slow_recovery() -> None:
    away = Injected(kind="kill store", target="streams", begin_ms=3_000, end_ms=3_400)
    assert recovery_ms(HISTORY, [kill("worker1.1", 2_500), away], [])["kill worker"] == [1_100]


def test_a_lease_that_ran_out_without_a_fault_is_unexplained() -> None:
    leases = leases_of(HISTORY)
    assert unexplained(leases, [kill("worker1.1", 2_500)]) == []
    for other in ([], [kill("worker2.1", 2_500)], [kill("worker1.1", 9_000)]):
        assert [lease.job_id for lease in unexplained(leases, other)] == ["job"]


def test_a_machine_that_starved_explains_what_ran_out_then_and_nothing_else() -> None:
    def starved(begin_ms: int) -> Injected:
        return Injected(kind=STARVED, target="all", begin_ms=begin_ms, end_ms=begin_ms + 400)

    leases = leases_of(HISTORY)
    assert unexplained(leases, [starved(3_000)]) == []
    assert [lease.job_id for lease in unexplained(leases, [starved(9_000)])] == ["job"]
    assert recovery_ms(HISTORY, [kill("worker1.1", 2_500), starved(3_000)], []) == {
        "kill worker": [1_100]
    }


def test_an_outcome_is_lost_with_its_worker_only_if_its_handler_had_finished() -> None:
    leases, faults = leases_of(HISTORY), [kill("worker1.1", 2_500)]
    assert outcomes_lost(leases, faults, {("job", 1): 2_400}) == 1
    assert outcomes_lost(leases, faults, {("job", 1): 2_600}) == 0
    assert outcomes_lost(leases, faults, {}) == 0


def test_an_outcome_that_was_under_way_when_the_store_went_is_lost_once() -> None:
    def away(begin_ms: int) -> Injected:
        hit = ("worker1.1", "worker2.1")
        return Injected(kind="kill store", target="s", begin_ms=begin_ms, end_ms=3_000, workers=hit)

    leases = leases_of(HISTORY)
    both = [away(2_500), away(2_600), kill("worker1.1", 2_700)]
    assert outcomes_lost(leases, both, {("job", 1): 2_400}) == 1
    assert outcomes_lost(leases, [away(2_300)], {("job", 1): 2_400}) == 0, "it still ran"
    assert outcomes_lost(leases, [away(2_500)], {("job", 2): 2_400}) == 0, "it was settled"


def test_faults_after_the_last_job_do_not_count_as_chaos() -> None:
    planned = {"kill worker": 1}
    assert check_faults([kill("worker1.1", 2_500)], planned, HISTORY).ok
    assert not check_faults([kill("worker1.1", 6_000)], planned, HISTORY).ok
    assert not check_faults([], planned, HISTORY).ok


def test_faults_that_hit_nobody_do_not_prove_recovery() -> None:
    assert check_recovery({"kill worker": [1_500]}, 1_500, {"kill worker": 1}).ok
    assert not check_recovery({"kill worker": []}, 1_500, {"kill worker": 1}).ok
    assert not check_recovery({"kill worker": [60_000]}, 1_500, {"kill worker": 1}).ok


def test_jobs_that_end_otherwise_than_planned_are_noticed() -> None:
    assert check_ends("streams", HISTORY, {"done": 1, "error": 0}).ok
    assert not check_ends("streams", HISTORY, {"done": 0, "error": 1}).ok


def loaded(tmp_path: Path, acked: dict[str, str]) -> Load:
    load = Load(tmp_path / "clients.jsonl", Random(1))
    load.wanted = {key: Wanted(key, "chat", {"n": key}) for key in ("a", "b")}
    load.acked = acked
    load.close()
    return load


def stored(job_id: str, key: str) -> JournalEvent:
    payload = Wanted(key, "chat", {"n": key}).encoded
    return JournalEvent(
        seq="1-0.0",
        contract="streams",
        queue="jobs:stream",
        job_id=job_id,
        type="submit",
        ts_ms=1,
        payload_h=short_hash(payload),
    )


def test_submits_that_are_missing_doubled_invented_or_changed_are_noticed(tmp_path: Path) -> None:
    both = loaded(tmp_path, {"a": "1", "b": "2"})
    one, two = stored("1", "a"), stored("2", "b")

    def held(load: Load, *events: JournalEvent) -> list[bool]:
        return [check.ok for check in check_submits(load, events)]

    assert held(both, one, two) == [True, True, True]
    assert held(loaded(tmp_path, {"a": "1"}), one) == [False, True, True]
    assert held(both, one) == [True, False, True]
    assert held(both, one, two, two) == [True, False, True]
    assert held(both, one, two, stored("3", "a")) == [True, False, False]
    assert held(both, one, stored("2", "a")) == [True, True, False]
    assert held(loaded(tmp_path, {"a": "1", "b": "1"}), one) == [True, False, False]


def test_effects_are_read_as_they_grow_and_never_by_half_a_line(tmp_path: Path) -> None:
    path, effects = tmp_path / "effects-1.jsonl", Effects(tmp_path)
    line = b'{"e":"%s","job_id":"j","fence":1,"attempt":1,"worker_id":"worker1.1","ms":7}\n'
    path.write_bytes(line % b"start" + (line % b"end")[:20])
    assert effects.refresh() == 0
    assert effects.starts == [Effect("start", "j", 1, 1, "worker1.1", 7)]
    assert effects.open_of("worker1.1") == {("j", 1)}
    path.write_bytes(line % b"start" + line % b"end")
    assert effects.refresh() == 1
    assert effects.open_of("worker1.1") == set()


def test_the_seed_decides_the_plan_of_faults() -> None:
    kinds = {"kill worker": 5, "kill store": 2}
    assert plan(Random(3), kinds) == plan(Random(3), kinds)
    assert plan(Random(3), kinds) != plan(Random(4), kinds)
    assert sorted(fault.kind for fault in plan(Random(3), kinds)) == sorted(
        ["kill worker"] * 5 + ["kill store"] * 2
    )
