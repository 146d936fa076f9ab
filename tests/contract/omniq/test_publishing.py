"""Publish: what is stored, what is refused, and that a job is stored once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tenure.contracts.omniq import Client
from tenure.core.errors import Conflict, StoreError, TenureError, UsageError
from tenure.core.job import NewJob
from tests.contract.omniq.conftest import Bench


@pytest.mark.clause("O-1")
def test_a_queue_is_named_with_braces_once() -> None:
    assert Client.queue_base("emails") == Client.queue_base("{emails}") == "{emails}"


@pytest.mark.clause("O-1")
@pytest.mark.parametrize("name", ["", "a b", "a{q}b", "ü", "x" * 129, "a:b"])
def test_a_name_that_no_client_could_use_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="letters"):
        Client.queue_base(name)


@pytest.mark.clause("O-2")
def test_ids_sort_by_time_even_within_a_millisecond() -> None:
    ids = [Client.ulid() for _ in range(5_000)]
    assert ids == sorted(set(ids))
    assert all(len(each) == 26 for each in ids)
    now_ms = Client.now_ms()
    stamp = 0
    for letter in ids[-1][:10]:
        stamp = stamp * 32 + "0123456789ABCDEFGHJKMNPQRSTVWXYZ".index(letter)
    assert abs(now_ms - stamp) < 5_000


@pytest.mark.clause("O-5", "O-13", "O-7")
async def test_a_job_is_a_hash_with_the_fields_that_clients_read(bench: Bench) -> None:
    job_id = await bench.client.publish(
        bench.name, {"a": "é", "b": [1, 2.5, None]}, timeout_ms=1_000, max_attempts=5, backoff_ms=9
    )
    stored = bench.hash(job_id)
    now_ms = stored.pop("created_ms")
    assert abs(int(now_ms) - Client.now_ms()) < 60_000
    assert stored.pop("tn")
    assert stored == {
        "id": job_id,
        "payload": '{"a":"é","b":[1,2.5,null]}',
        "state": "wait",
        "attempt": "0",
        "max_attempts": "5",
        "timeout_ms": "1000",
        "backoff_ms": "9",
        "updated_ms": now_ms,
        "queued_ms": now_ms,
        **dict.fromkeys(("first_started_ms", "last_started_ms", "completed_ms", "failed_ms"), ""),
    }
    assert bench.ids("wait") == [job_id]


@pytest.mark.clause("O-7", "O-13")
async def test_a_grouped_job_stands_in_its_groups_list(bench: Bench) -> None:
    (job_id,) = await bench.publish({"a": 1}, gid=" team ", group_limit=3, job_id="j-1")
    assert job_id == "j-1"
    assert bench.hash(job_id)["gid"] == "team"
    assert bench.ids("g:team:wait") == ["j-1"]
    assert bench.raw.get(bench.key("g:team:limit")) == b"3"
    assert bench.raw.get(bench.key("has_groups")) == b"1"
    assert bench.ids("groups:ready") == ["team"]
    assert "due_ms" not in bench.hash(job_id)


@pytest.mark.clause("O-5")
@pytest.mark.parametrize(
    "payload",
    [
        "text",
        b"bytes",
        7,
        1.5,
        None,
        True,
        {1, 2},
        (1, 2),
        {"a": float("nan")},
        [float("inf")],
        {"a": b"x"},
    ],
    ids=lambda payload: type(payload).__name__ + repr(payload)[:12],
)
async def test_a_payload_that_is_no_object_or_array_is_refused(bench: Bench, payload: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        await bench.client.publish(bench.name, payload)
    assert isinstance(caught.value, TenureError)
    with pytest.raises((TypeError, ValueError)):
        await bench.client.publish_many(bench.name, [({"good": 1}, {}), (payload, {})])
    assert bench.all_keys() == set()


@pytest.mark.clause("O-7")
@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout_ms": 0},
        {"max_attempts": 1.5},
        {"backoff_ms": -1},
        {"due_ms": 1.5},
        {"group_limit": -1},
        {"job_id": ""},
        {"job_id": "a\nb"},
        {"gid": "a\tb"},
        {"backoff": "sometimes"},
    ],
    ids=repr,
)
async def test_an_option_that_cannot_be_is_refused(bench: Bench, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        await bench.client.publish(bench.name, {}, **wrong)
    assert bench.all_keys() == set()


@pytest.mark.clause("O-7", "O-17")
@pytest.mark.parametrize("max_attempts", [0, -3])
async def test_max_attempts_below_one_acts_as_one(bench: Bench, max_attempts: int) -> None:
    await bench.publish({}, job_id="j", max_attempts=max_attempts)
    assert bench.hash("j")["max_attempts"] == str(max_attempts)  # as OmniQ stores it
    job = await bench.reserve()
    assert (job.attempt, job.max_attempts) == (1, 1)
    answer = await bench.client.ack_fail(bench.name, "j", job.lease_token)
    assert answer == ("FAILED", None)


@pytest.mark.clause("O-12", "O-50", "O-21")
async def test_a_delayed_job_is_reserved_after_it_was_promoted(bench: Bench) -> None:
    (job_id,) = await bench.publish({}, due_ms=5_000, now_ms_override=1_000)
    assert bench.raw.zscore(bench.key("delayed"), job_id) == 5_000
    assert bench.hash(job_id)["due_ms"] == "5000"
    assert await bench.client.promote_delayed(bench.name, now_ms_override=4_999) == 0
    assert await bench.client.reserve(bench.name, 6_000) is None
    assert await bench.client.promote_delayed(bench.name, now_ms_override=5_000) == 1
    assert (await bench.reserve(6_000)).job_id == job_id


@pytest.mark.clause("O-28")
async def test_the_same_id_again_is_the_same_job(bench: Bench) -> None:
    for _ in range(3):
        assert await bench.publish({"n": 1}, job_id="one", gid="g") == ["one"]
    assert bench.ids("g:g:wait") == ["one"]
    job = await bench.reserve()
    assert await bench.publish({"n": 1}, job_id="one", gid="g") == ["one"]
    assert await bench.client.reserve(bench.name) is None
    await bench.client.ack_success(bench.name, job.job_id, job.lease_token)
    assert await bench.publish({"n": 1}, job_id="one", gid="g") == ["one"]
    assert await bench.client.reserve(bench.name) is None


@pytest.mark.clause("O-28")
@pytest.mark.parametrize("other", [({"n": 2}, {}), ({"n": 1}, {"gid": "elsewhere"})])
async def test_the_same_id_for_another_job_is_an_error(bench: Bench, other: Any) -> None:
    await bench.publish({"n": 1}, job_id="one")
    before = bench.hash("one")
    with pytest.raises(Conflict, match="one"):
        await bench.client.publish(bench.name, other[0], job_id="one", **other[1])
    assert bench.hash("one") == before
    assert bench.ids("wait") == ["one"]


@pytest.mark.clause("O-28")
async def test_a_publish_whose_answer_was_lost_is_stored_once_even_if_it_ran(bench: Bench) -> None:
    """The job runs and is forgotten before the publisher asks again."""
    queue, lose = await bench.lossy_queue()
    new = NewJob(task="t", payload=b"{}", job_id="one")
    lose()
    with pytest.raises(StoreError):
        await queue.submit([new])
    await bench.run_all(1)
    await bench.publish(*[{}] * 100)
    await bench.run_all(100)  # what was kept of it is pushed out
    assert bench.hash("one") == {}
    (again,) = await queue.submit([new])
    assert again.status == "replayed"
    assert bench.ids("wait") == []


@pytest.mark.clause("O-28")
async def test_the_client_sends_again_what_was_not_answered(bench: Bench) -> None:
    client, lose = await bench.lossy_client()
    lose()
    assert await client.publish(bench.name, {}, job_id="one") == "one"
    assert bench.ids("wait") == ["one"]


@pytest.mark.clause("O-29")
async def test_many_jobs_are_published_in_order_and_in_few_steps(bench: Bench) -> None:
    before = bench.raw.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
    jobs = [({"n": n}, {"gid": f"g{n % 3}"} if n % 2 else {}) for n in range(1_200)]
    ids = await bench.client.publish_many(bench.name, jobs)
    calls = bench.raw.info("commandstats")["cmdstat_evalsha"]["calls"] - before
    assert calls <= 6
    assert bench.ids("wait") == ids[::2]
    assert bench.ids("g:g1:wait") == [each for n, each in enumerate(ids) if n % 2 and n % 3 == 1]
    assert [json.loads(bench.hash(each)["payload"])["n"] for each in ids[:50]] == list(range(50))


@pytest.mark.clause("O-1")
async def test_a_queue_url_that_cannot_be_is_refused() -> None:
    from tenure.core.registry import open_queue

    for url in ("omniq+redis://h:1/0", "omniq+redis://h:1/0?queue=a b", "omniq://?queue=x"):
        with pytest.raises(UsageError):
            open_queue(url)
    with pytest.raises(UsageError, match="timeout_ms"):
        open_queue("omniq+redis://h:1/0?queue=a&timeout_ms=1")
