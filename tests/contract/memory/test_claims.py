"""Claims that the network kept back, or whose answers it lost, in orders the suite cannot make."""

import pytest

from tenure.contracts.memory.store import ClaimId, MemoryOptions, MemoryStore
from tenure.core.job import NewJob
from tenure.core.lease import Lease
from tenure.core.outcome import Outcome

pytestmark = pytest.mark.clause("M-9")


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore("claims", MemoryOptions(lease_ms=1000), now_ms=lambda: 1_000_000)
    for n in range(6):
        store.submit(NewJob(task="t", payload=b"{}", job_id=f"j{n}"))
    return store


def claim(store: MemoryStore, number: int, received: int, limit: int) -> list[str]:
    leases = store.claim("w1", ClaimId("instance", number, received), limit)
    return [lease.job_id for lease in leases]


def test_a_claim_that_arrives_after_a_later_one_takes_nothing(store: MemoryStore) -> None:
    assert claim(store, 2, 0, 2) == ["j0", "j1"]
    assert claim(store, 1, 0, 2) == []
    assert claim(store, 3, 2, 2) == ["j2", "j3"]


def test_a_lost_answer_is_given_again_before_anything_new(store: MemoryStore) -> None:
    assert claim(store, 1, 0, 2) == ["j0", "j1"]
    assert claim(store, 2, 0, 3) == ["j0", "j1", "j2"]
    assert claim(store, 3, 2, 3) == ["j3", "j4", "j5"]


def test_a_lost_answer_larger_than_the_free_slots_comes_in_parts(store: MemoryStore) -> None:
    assert claim(store, 1, 0, 4) == ["j0", "j1", "j2", "j3"]
    assert claim(store, 2, 0, 1) == ["j0"]
    assert claim(store, 3, 2, 2) == ["j1", "j2"]
    assert claim(store, 4, 3, 2) == ["j3", "j4"]
    assert claim(store, 5, 4, 2) == ["j5"]


def test_what_was_settled_meanwhile_is_not_given_again(store: MemoryStore) -> None:
    (lease,) = store.claim("w1", ClaimId("instance", 1, 0), 1)
    store.settle(Outcome(lease, "complete"))
    assert claim(store, 2, 0, 1) == ["j1"]


def test_another_instance_does_not_get_the_lost_answer(store: MemoryStore) -> None:
    assert claim(store, 1, 0, 2) == ["j0", "j1"]
    leases = store.claim("w1", ClaimId("another", 1, 0), 1)
    assert [lease.job_id for lease in leases] == ["j2"]


def test_the_lease_that_is_given_again_is_the_same_and_lasts_its_full_time() -> None:
    now = [1_000_000]
    store = MemoryStore("again", MemoryOptions(lease_ms=1000), now_ms=lambda: now[0])
    store.submit(NewJob(task="t", payload=b"{}", job_id="j"))
    (first,) = store.claim("w1", ClaimId("instance", 1, 0), 1)
    now[0] += 900
    store.begin()
    (again,) = store.claim("w1", ClaimId("instance", 2, 0), 1)
    assert isinstance(again, Lease)
    assert (again.fence, again.token, again.attempt) == (first.fence, first.token, 1)
    assert again.lease_until_ms == first.lease_until_ms + 900
    assert again.lease_ms == 1000
