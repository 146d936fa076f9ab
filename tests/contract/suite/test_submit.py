"""Submit: stored, claimable, idempotent, bounded."""

import asyncio
import time

import pytest

from tenure.core.job import NewJob
from tests.contract.adapters import Stage
from tests.contract.suite.acting import (
    claim,
    claim_one,
    claim_when_due,
    job,
    record,
    settle,
    state,
    submit,
)

pytestmark = pytest.mark.clause("M-2")


async def test_a_submitted_job_is_stored_and_can_be_claimed(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job(payload=b'{"a":[1,2.5,"\xc3\xa9"]}', task="draw"))
    stored = await record(stage, job_id)
    assert (stored.state, stored.task, stored.attempt) == (stage.words.waiting, "draw", 0)
    assert stored.created_ms > 0
    lease = await claim_one(queue)
    assert (lease.job_id, lease.task, lease.payload) == (
        job_id,
        "draw",
        b'{"a":[1,2.5,"\xc3\xa9"]}',
    )


async def test_a_job_without_an_id_gets_one(stage: Stage) -> None:
    queue = stage.queue()
    new = NewJob(task="work", payload=b"{}")
    first, second = await submit(queue, new, new)
    assert first
    assert second
    assert first != second


@pytest.mark.clause("M-3")
async def test_the_same_id_again_is_answered_and_not_stored_again(stage: Stage) -> None:
    queue = stage.queue("w1")
    new = job()
    await submit(queue, new)
    (again,) = await queue.submit([new])
    assert (again.job_id, again.status) == (new.job_id, "replayed")
    await claim(queue, 1)
    assert await queue.claim(10, wait_ms=0) == []


@pytest.mark.clause("M-3")
async def test_the_same_id_with_another_request_is_a_conflict(stage: Stage) -> None:
    queue = stage.queue()
    new = job()
    await submit(queue, new)
    (answer,) = await queue.submit([job(new.job_id, payload=b'{"other":1}')])
    assert answer.status == "conflict"
    assert answer.reason
    assert (await record(stage, new.job_id)).payload == new.payload


@pytest.mark.clause("M-3")
async def test_a_finished_job_still_answers_for_its_id(stage: Stage) -> None:
    queue = stage.queue("w1")
    new = job()
    await submit(queue, new)
    await settle(queue, await claim_one(queue), "complete")
    (answer,) = await queue.submit([new])
    assert answer.status == "replayed"
    assert await state(stage, new.job_id) == stage.words.done
    assert await queue.claim(1, wait_ms=0) == []


@pytest.mark.clause("M-3")
async def test_an_idempotency_key_names_one_job_of_its_requester(stage: Stage) -> None:
    queue = stage.queue()
    same = {"idempotency_key": "order-17", "requester": "r1", "payload": b'{"n":1}'}
    first = await submit(queue, job("a1", **same))
    (again,) = await queue.submit([job("a2", **same)])
    assert (again.status, again.job_id) == ("replayed", first[0])
    (other,) = await queue.submit([job("a3", **(same | {"payload": b'{"n":2}'}))])
    assert other.status == "conflict"
    (foreign,) = await queue.submit([job("a4", **(same | {"requester": "r2"}))])
    assert (foreign.status, foreign.job_id) == ("created", "a4")
    assert await stage.ledger.get("a2") is None


@pytest.mark.clause("M-3")
async def test_twenty_submits_of_one_key_at_once_make_one_job(stage: Stage) -> None:
    queues = [stage.queue(f"s{n}") for n in range(4)]
    storm = [
        queues[n % 4].submit([job(f"k{n}", idempotency_key="storm", payload=b"{}")])
        for n in range(20)
    ]
    answers = [answer for (answer,) in await asyncio.gather(*storm)]
    assert sorted({answer.status for answer in answers}) == ["created", "replayed"]
    assert [answer.status for answer in answers].count("created") == 1
    assert len({answer.job_id for answer in answers}) == 1


@pytest.mark.clause("M-3")
async def test_a_list_may_repeat_one_job_any_number_of_times(stage: Stage) -> None:
    queue = stage.queue()
    new = job(payload=b'{"n":1}')
    other = job(new.job_id, payload=b'{"n":2}')
    answers = await queue.submit([*[new] * 2_500, other, job()])
    statuses = ["created"] + ["replayed"] * 2_499 + ["conflict", "created"]
    assert [answer.status for answer in answers] == statuses
    assert {answer.job_id for answer in answers[:2_500]} == {new.job_id}
    assert (await record(stage, new.job_id)).payload == new.payload


@pytest.mark.clause("M-4")
@pytest.mark.needs("exact_depth")
@pytest.mark.options(depth_max=1)
async def test_a_full_queue_refuses_all_repetitions_of_a_job(stage: Stage) -> None:
    queue = stage.queue()
    (kept,) = await queue.submit([job()])
    assert kept.accepted
    new = job()
    answers = await queue.submit([new] * 1_500)
    assert {answer.status for answer in answers} == {"full"}
    assert await stage.ledger.get(new.job_id) is None


@pytest.mark.clause("M-4")
@pytest.mark.needs("exact_depth")
@pytest.mark.options(depth_max=3)
async def test_a_full_queue_refuses_and_says_when_to_come_back(stage: Stage) -> None:
    queue = stage.queue("w1")
    jobs = [job() for _ in range(5)]
    answers = await queue.submit(jobs)
    assert [answer.status for answer in answers] == ["created"] * 3 + ["full"] * 2
    assert all(answer.retry_after_ms > 0 for answer in answers[3:])
    assert await stage.ledger.get(jobs[3].job_id) is None
    (again,) = await queue.submit([jobs[0]])
    assert again.status == "replayed"


@pytest.mark.clause("M-2", "M-4", "M-5")
@pytest.mark.needs("exact_depth")
@pytest.mark.options(depth_max=1)
async def test_a_refused_submit_has_no_id_that_could_be_taken_for_a_job(stage: Stage) -> None:
    queue = stage.queue("w1")
    (kept,) = await queue.submit([job()])
    assert kept.accepted
    assert kept.job_id
    refused = [
        NewJob(task="work", payload=b"[2]"),
        NewJob(task="work", payload=b"{", job_id="odd"),
        NewJob(task="", payload=b"{}"),
        job(kept.job_id, payload=b"[3]"),
    ]
    answers = [(await queue.submit([each]))[0] for each in refused]
    assert [answer.status for answer in answers] == ["full", "invalid", "invalid", "conflict"]
    assert [answer.job_id for answer in answers] == [""] * 4
    assert all(answer.reason for answer in answers)


@pytest.mark.clause("M-4")
@pytest.mark.needs("exact_depth")
@pytest.mark.options(depth_max=2)
async def test_running_jobs_count_and_finished_ones_do_not(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, job(), job())
    lease, _ = await claim(queue, 2)
    (refused,) = await queue.submit([job()])
    assert refused.status == "full"
    await settle(queue, lease, "complete")
    await submit(queue, job())


@pytest.mark.clause("M-5")
@pytest.mark.parametrize(
    "wrong",
    [
        {"task": ""},
        {"payload": b"{not json"},
        {"max_attempts": 0},
        {"delay_ms": -1},
        {"ttl_ms": 0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_a_job_that_cannot_be_is_refused_with_a_reason(
    stage: Stage, wrong: dict[str, object]
) -> None:
    queue = stage.queue()
    before, after = job(), job()
    answers = await queue.submit([before, job("wrong-one", **wrong), after])
    assert [answer.status for answer in answers] == ["created", "invalid", "created"]
    assert answers[1].reason
    assert await stage.ledger.get("wrong-one") is None


@pytest.mark.clause("M-6")
async def test_a_delayed_job_is_claimed_when_it_is_due_and_not_before(stage: Stage) -> None:
    queue = stage.queue("w1")
    began_s, delay_ms = time.monotonic(), 200
    (job_id,) = await submit(queue, job(delay_ms=delay_ms))
    assert await state(stage, job_id) == stage.words.waiting
    assert (await claim_when_due(stage, queue, delay_ms, began_s)).job_id == job_id


@pytest.mark.clause("M-6")
@pytest.mark.needs("ttl_before_start")
async def test_a_job_that_nobody_started_in_time_ends_as_expired(stage: Stage) -> None:
    queue = stage.queue("w1")
    early, late = await submit(queue, job(ttl_ms=1_000), job(ttl_ms=3_000))
    await stage.advance(1_001)
    assert (await claim_one(queue)).job_id == late
    stored = await record(stage, early)
    assert stored.state == stage.words.failed
    assert b"expired" in stored.error


async def test_a_batch_of_a_thousand_is_stored_whole(stage: Stage) -> None:
    queue = stage.queue("w1")
    ids = await submit(queue, *[job() for _ in range(1_000)])
    counts = await stage.ledger.counts()
    assert counts.states[stage.words.waiting] == len(set(ids)) == 1_000
