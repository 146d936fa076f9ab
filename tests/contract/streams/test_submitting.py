"""S-1 to S-7 and S-24 to S-26: what a submitted job leaves in Redis, seen by a foreign client."""

from __future__ import annotations

import asyncio
import json

import pytest

from tenure.core.job import NewJob

HASH_FIELDS = {
    "job_id", "task", "payload", "status", "created_ts", "updated_ts", "ttl_s", "result", "error",
}  # fmt: skip


def new(job_id: str = "", **more: object) -> NewJob:
    return NewJob(task="chat", payload=b'{"prompt":"hi"}', job_id=job_id, **more)  # type: ignore[arg-type]


@pytest.mark.clause("S-1")
async def test_a_waiting_job_is_one_stream_entry_with_three_fields(bench):
    (answer,) = await bench.queue().submit([new()])
    ((_, fields),) = await bench.outside.xrange(bench.key("jobs:stream"))
    assert fields == {"job_id": answer.job_id, "task": "chat", "payload": '{"prompt":"hi"}'}


@pytest.mark.clause("S-2", "S-3")
async def test_the_hash_has_the_contracts_fields_as_texts(bench):
    (answer,) = await bench.queue().submit([new(ttl_ms=60_000)])
    job = await bench.job(answer.job_id)
    assert set(job) >= HASH_FIELDS
    assert job["status"] == "queued"
    assert json.loads(job["payload"]) == {"prompt": "hi"}
    assert (job["result"], job["error"], job["ttl_s"]) == ("", "", "60")
    assert job["created_ts"] == job["updated_ts"]
    assert int(job["created_ts"]) > 1_600_000_000_000


@pytest.mark.clause("S-4", "S-5")
async def test_the_first_event_is_queued_by_the_gateway(bench):
    (answer,) = await bench.queue().submit([new()])
    ((_, fields),) = await bench.outside.xrange(bench.key(f"job:{answer.job_id}:events"))
    job = await bench.job(answer.job_id)
    assert fields == {
        "type": "queued",
        "ts": job["created_ts"],
        "step": "gateway.enqueue",
        "data": "{}",
    }


@pytest.mark.clause("S-6")
@pytest.mark.parametrize(("ttl_ms", "seconds"), [(None, 77), (5_000, 5), (1, 1)])
async def test_hash_and_events_expire_after_the_time_to_live(bench, ttl_ms, seconds):
    (answer,) = await bench.queue(ttl_s=77).submit([new(ttl_ms=ttl_ms)])
    for key in (f"job:{answer.job_id}", f"job:{answer.job_id}:events"):
        assert await bench.outside.ttl(bench.key(key)) == seconds


@pytest.mark.clause("S-24")
async def test_an_idempotency_key_maps_to_its_job_with_a_time_to_live(bench):
    queue = bench.queue(idempotency_ttl_s=500, ttl_s=100)
    first, again = await queue.submit([new(idempotency_key="k"), new(idempotency_key="k")])
    assert (first.status, again.status) == ("created", "replayed")
    assert first.job_id == again.job_id
    key = bench.key("idempotency:k")
    assert (await bench.outside.get(key)).startswith(first.job_id)
    assert await bench.outside.ttl(key) == 500
    assert await bench.outside.xlen(bench.key("jobs:stream")) == 1


@pytest.mark.clause("S-24")
async def test_the_same_key_with_another_request_is_a_conflict_and_writes_nothing(bench):
    queue = bench.queue()
    await queue.submit([new(idempotency_key="k")])
    (other,) = await queue.submit([NewJob(task="plan", payload=b"{}", idempotency_key="k")])
    assert other.status == "conflict"
    assert await bench.outside.xlen(bench.key("jobs:stream")) == 1


@pytest.mark.clause("S-24")
async def test_two_requesters_with_the_same_key_never_meet(bench):
    queue = bench.queue()
    answers = await queue.submit(
        [
            new(idempotency_key="k"),
            new(idempotency_key="k", requester="r1"),
            new(idempotency_key="k", requester="r2"),
            new(idempotency_key="@r1:k"),
        ]
    )
    assert [answer.status for answer in answers] == ["created"] * 4
    assert len({answer.job_id for answer in answers}) == 4


@pytest.mark.clause("S-24")
async def test_twenty_parallel_submits_of_one_key_make_one_job(bench):
    queues = [bench.queue(f"w{n}") for n in range(4)]
    answers = await asyncio.gather(
        *(queues[n % 4].submit([new(idempotency_key="storm")]) for n in range(20))
    )
    assert len({answer[0].job_id for answer in answers}) == 1
    assert sorted(answer[0].status for answer in answers).count("created") == 1


@pytest.mark.clause("S-26")
async def test_sending_the_same_job_id_again_changes_nothing(bench):
    queue = bench.queue()
    await queue.submit([new("j1")])
    before = await bench.job("j1")
    (again,) = await queue.submit([new("j1")])
    (other,) = await queue.submit([NewJob(task="plan", payload=b"{}", job_id="j1")])
    assert (again.status, other.status) == ("replayed", "conflict")
    assert await bench.job("j1") == before
    assert await bench.outside.xlen(bench.key("jobs:stream")) == 1


@pytest.mark.clause("S-26")
async def test_a_job_is_never_stored_without_being_queued(bench):
    """All keys of a submit appear in one step: no observer sees one without the others."""
    queue = bench.queue()
    stop = asyncio.Event()
    torn: list[tuple[int, int]] = []

    async def watch() -> None:
        while not stop.is_set():
            async with bench.outside.pipeline(transaction=True) as pipe:
                pipe.xlen(bench.key("jobs:stream"))
                pipe.zcard(bench.key("jobs:index"))
                length, indexed = await pipe.execute()
            if length != indexed:
                torn.append((length, indexed))

    watcher = asyncio.create_task(watch())
    for _ in range(50):
        await queue.submit([new() for _ in range(20)])
    stop.set()
    await watcher
    assert not torn


@pytest.mark.clause("S-25")
async def test_a_full_queue_takes_no_more_and_says_when_to_try_again(bench):
    queue = bench.queue(max_depth=3)
    answers = await queue.submit([new() for _ in range(5)])
    assert [answer.status for answer in answers] == ["created"] * 3 + ["full"] * 2
    assert answers[-1].retry_after_ms > 0
    leases = await queue.claim(10, wait_ms=0)
    assert (await queue.submit([new()]))[0].status == "full", "running jobs count as well"
    assert len(leases) == 3


@pytest.mark.clause("S-25")
async def test_entries_that_a_foreign_worker_acknowledged_do_not_count(bench):
    queue = bench.queue(max_depth=3)
    await queue.submit([new() for _ in range(3)])
    stream = bench.key("jobs:stream")
    await bench.outside.xgroup_create(stream, "workers", "0")
    ((_, entries),) = await bench.outside.xreadgroup("workers", "foreign", {stream: ">"})
    await bench.outside.xack(stream, "workers", *[entry_id for entry_id, _ in entries])
    assert await bench.outside.xlen(stream) == 3, "it acknowledges without deleting"
    assert (await queue.submit([new()]))[0].status == "created"


@pytest.mark.clause("S-3", "S-26")
@pytest.mark.parametrize(
    ("job", "words"),
    [
        (NewJob(task="chat", payload=b"{bad"), "not JSON"),
        (NewJob(task="", payload=b"{}"), "task"),
        (NewJob(task="chat", payload=b"{}", job_id="a b"), "job id"),
        (NewJob(task="chat", payload=b"{}", max_attempts=0), "max_attempts"),
        (NewJob(task="chat", payload=b"{}", delay_ms=-1), "delay_ms"),
        (NewJob(task="chat", payload=b"{}", options={"lifo": True}), "lifo"),
        (NewJob(task="chat", payload=b"{}", idempotency_key="x\n"), "printable"),
    ],
)
async def test_a_bad_job_is_refused_with_a_reason_and_its_neighbours_are_stored(bench, job, words):
    first, bad, last = await bench.queue().submit([new(), job, new()])
    assert (first.status, bad.status, last.status) == ("created", "invalid", "created")
    assert words in bad.reason
    assert await bench.outside.xlen(bench.key("jobs:stream")) == 2
