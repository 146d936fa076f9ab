"""What an add leaves in Redis, and what it refuses."""

import json

import pytest

from tenure.contracts.bullmq.schema import VIDEO_GENERATION
from tenure.core.errors import InvalidJob, ReplyLost
from tenure.core.job import NewJob
from tests.chaos.proxy import LossyProxy
from tests.contract.bullmq.conftest import Bench

VIDEO = {
    "videoId": "550e8400-e29b-41d4-a716-446655440000",
    "userId": "user-123",
    "script": {
        "title": "My Video",
        "scenes": [
            {"sceneNumber": 1, "duration": 5, "voiceover": "Welcome", "imagePrompt": "Sunset"}
        ],
    },
    "userImageUrls": ["https://example.com/img1.jpg"],
}
OPTIONS = {"priority": 1, "attempts": 3, "backoff": {"type": "exponential", "delay": 1000}}


@pytest.mark.clause("B-1", "B-4", "B-6")
async def test_the_contracts_own_example_is_stored_as_bullmq_stores_it(bench: Bench) -> None:
    job_id = await bench.producer().add("video-generation", VIDEO, **OPTIONS)
    assert job_id == "1" == bench.raw.get(bench.key("id")).decode()
    stored = bench.hash("1")
    assert json.loads(stored["data"]) == VIDEO
    assert json.loads(stored["opts"]) == OPTIONS
    assert (stored["name"], stored["delay"], stored["priority"]) == ("video-generation", "0", "1")
    assert bench.ids("prioritized") == ["1"]
    assert bench.raw.zscore(bench.key("prioritized"), "1") == 2**32 + 1
    assert [event["event"] for event in bench.events()] == ["added", "waiting"]
    assert bench.raw.zscore(bench.key("marker"), "0") == 0


@pytest.mark.clause("B-2")
async def test_no_unfinished_job_has_attempts_made(bench: Bench) -> None:
    queue = bench.queue()
    job_id = await bench.producer().add("work", {}, attempts=3)
    (lease,) = await queue.claim(1, wait_ms=100)
    assert "attemptsMade" not in bench.hash(job_id)
    record = await bench.ledger().get(job_id)
    assert record is not None
    assert record.extra["attemptsMade"] == 0
    assert lease.attempt == 1


@pytest.mark.clause("B-3", "B-5")
async def test_each_kind_of_job_enters_its_own_line(bench: Bench) -> None:
    producer = bench.producer()
    first, second = await producer.add("work"), await producer.add("work")
    front = await producer.add("work", lifo=True)
    late = await producer.add("work", delay=60_000)
    assert bench.ids("wait") == [second, first, front]
    assert bench.ids("delayed") == [late]
    score = bench.raw.zscore(bench.key("delayed"), late)
    stored = bench.hash(late)
    assert int(score) // 4096 == int(stored["timestamp"]) + 60_000
    assert bench.events()[-1]["event"] == "delayed"


@pytest.mark.clause("B-7")
async def test_a_deduplicated_job_is_turned_away_until_its_twin_has_ended(bench: Bench) -> None:
    producer, queue = bench.producer(), bench.queue()
    first = await producer.add("work", {"n": 1}, deduplication={"id": "d"})
    assert await producer.add("work", {"n": 2}, deduplication={"id": "d"}) == first
    (lease,) = await queue.claim(5, wait_ms=100)
    from tenure.core.outcome import Outcome

    await queue.settle([Outcome(lease, "complete")])
    assert await producer.add("work", {"n": 3}, deduplication={"id": "d"}) != first


@pytest.mark.clause("B-7")
async def test_the_last_job_turned_away_while_its_twin_ran_follows_it(bench: Bench) -> None:
    from tenure.core.outcome import Outcome

    producer, queue = bench.producer(), bench.queue()
    keep = {"id": "d", "keepLastIfActive": True}
    first = await producer.add("work", {"n": 1}, deduplication=keep)
    (lease,) = await queue.claim(1, wait_ms=100)
    for n in (2, 3):
        assert await producer.add("work", {"n": n}, deduplication=keep) == first
    await queue.settle([Outcome(lease, "complete")])
    (follower,) = await queue.claim(5, wait_ms=100)
    assert follower.payload == b'{"n":3}'


@pytest.mark.clause("B-32")
async def test_an_id_of_bullmqs_own_kind_is_refused(bench: Bench) -> None:
    producer = bench.producer()
    with pytest.raises(InvalidJob, match="whole number"):
        await producer.add("work", job_id="17")
    with pytest.raises(InvalidJob, match="colon"):
        await producer.add("work", job_id="a:b")
    (answer,) = await bench.queue().submit([NewJob(task="work", payload=b"{}", job_id="17")])
    assert answer.status == "invalid"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"priority": -1}, "priority"),
        ({"priority": 2**21}, "priority"),
        ({"delay": -5}, "delay"),
        ({"atempts": 3}, "attempts"),
        ({"deduplication": {"ttl": 5}}, "deduplication"),
    ],
)
async def test_an_option_that_cannot_be_is_refused_with_a_reason(
    bench: Bench, options: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidJob, match=says):
        await bench.producer().add("work", {}, **options)
    assert bench.raw.keys(bench.key("*")) == []


@pytest.mark.clause("B-33")
async def test_an_add_whose_answer_was_lost_is_stored_once(bench: Bench) -> None:
    from tenure.contracts.bullmq import open_producer

    proxy = await LossyProxy(bench.server).start()
    lossy = open_producer(f"bullmq+{proxy.url}?queue={bench.name}")
    await lossy.add("first")
    proxy.drop_reply(when=lambda command: bytes(command[0]).upper().startswith(b"EVAL"))
    try:
        job_id = await lossy.add("second")
    except ReplyLost:
        pytest.fail("the producer did not send it again")
    assert job_id == "2"
    assert bench.ids("wait") == ["2", "1"]
    await lossy.close()
    await proxy.stop()


@pytest.mark.clause("B-45")
async def test_a_payload_that_breaks_the_schema_is_refused_and_nothing_is_written(
    bench: Bench,
) -> None:
    producer = bench.producer(schema=VIDEO_GENERATION)
    await producer.add("video-generation", VIDEO)
    wrong = {**VIDEO, "videoId": "x", "script": {"title": "", "scenes": [{"duration": 0}]}}
    with pytest.raises(InvalidJob) as caught:
        await producer.add("video-generation", wrong)
    text = str(caught.value)
    assert "payload.videoId must be a uuid" in text
    assert "payload.script.scenes[0].sceneNumber is missing" in text
    assert "payload.script.scenes[0].duration must be more than 0" in text
    assert bench.ids("wait") == ["1"]
