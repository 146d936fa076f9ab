"""Portable states and options: every state of every contract means one of six."""

import pytest

from tenure.core.errors import InvalidJob
from tenure.core.job import JobRecord
from tenure.core.portable import (
    STATES,
    check_options,
    end_of,
    known_words,
    own_words,
    portable_counts,
    state_of,
)
from tenure.core.registry import machines

MACHINES = machines()


def record(contract: str, state: str, *, error: bytes = b"", due_ms: int = 0) -> JobRecord:
    return JobRecord(
        job_id="j", contract=contract, queue="q", task="t", state=state, error=error, due_ms=due_ms
    )


@pytest.mark.parametrize("contract", MACHINES)
def test_every_state_of_a_contract_is_one_of_the_portable_ones(contract: str) -> None:
    machine = MACHINES[contract]
    found = {word: state_of(record(contract, word)) for word in machine.states}
    assert set(found.values()) <= set(STATES)
    assert {found[word] for word in machine.running} == {"running"}
    assert found[machine.final[0]] == "done"
    assert all(found[word] in ("failed", "cancelled") for word in machine.final[1:])
    assert all(found[word] in ("waiting", "scheduled") for word in machine.initial)


@pytest.mark.parametrize("contract", MACHINES)
def test_a_cancelled_job_is_told_from_a_failed_one_by_its_error(contract: str) -> None:
    word = MACHINES[contract].final[1]
    for code in ("cancelled", "Cancel"):
        error = b'{"code":"%s","message":"on request"}' % code.encode()
        assert state_of(record(contract, word, error=error)) == "cancelled"
    for error in (b'{"code":"ValueError","message":"cancelled"}', b"cancelled", b"[1]"):
        assert state_of(record(contract, word, error=error)) == "failed"


def test_a_job_whose_time_has_not_come_is_scheduled() -> None:
    assert state_of(record("streams", "queued", due_ms=2_000)) == "scheduled"
    assert state_of(record("streams", "queued", due_ms=0)) == "waiting"
    assert state_of(record("omniq", "wait", due_ms=2_000)) == "waiting"  # it has a word for it
    assert state_of(record("inbox", "dead_letter", due_ms=2_000)) == "failed"


def test_a_resting_state_is_no_end() -> None:
    assert end_of("inbox", "failed") is None
    assert end_of("inbox", "dead_letter") == "failed"
    assert end_of("bullmq", "failed") == "failed"
    assert state_of(record("inbox", "failed")) == "waiting"


@pytest.mark.parametrize("contract", MACHINES)
@pytest.mark.parametrize("state", STATES)
def test_jobs_of_a_state_are_looked_for_under_every_word_that_may_mean_it(
    contract: str, state: str
) -> None:
    words = own_words(contract, (state,), known_words(contract))
    assert words or state == "scheduled"
    meant = {state_of(record(contract, word)) for word in words}
    assert state in meant or state in ("scheduled", "cancelled")


def test_counts_of_words_add_up_by_state() -> None:
    counts = {"waiting": 1, "prioritized": 2, "delayed": 3, "active": 4, "failed": 5, "paused": 6}
    assert portable_counts("bullmq", counts) == {
        **dict.fromkeys(STATES, 0),
        "waiting": 9,
        "scheduled": 3,
        "running": 4,
        "failed": 5,
    }


def test_an_option_that_a_contract_does_not_have_is_refused_by_name() -> None:
    check_options("streams", {"priority": 0, "group": "", "unique": None, "ttl_s": 5})
    with pytest.raises(InvalidJob, match=r"bullmq has no groups \(group\).*memory, omniq"):
        check_options("bullmq", {"group": "a"})
