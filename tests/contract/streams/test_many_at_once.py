"""S-15, S-22, S-30: outcomes that travel together are judged and noted each for itself."""

from __future__ import annotations

import pytest

from tenure.contracts.streams.queue import SCRIPTS
from tenure.core.errors import LeaseLost
from tenure.core.job import NewJob
from tenure.core.outcome import COMPLETED, Completed, Failure, Outcome, Retried
from tenure.core.registry import open_queue

COUNT = 120
BOOM = Failure(code="Boom", message="it broke", stack="line 1")


async def claimed(bench, count: int = COUNT):
    queue = bench.queue("w1", lease_ms=60_000)
    jobs = [NewJob(task="chat", payload=b"{}", job_id=f"j{number}") for number in range(count)]
    await queue.submit(jobs)
    return queue, await queue.claim(count, wait_ms=0)


async def noted(bench, kind: str) -> list[str]:
    events = await bench.journal().read(limit=100_000)
    return [event.job_id for event in events if event.type == kind]


@pytest.mark.clause("S-22")
async def test_one_that_lost_its_lease_among_many_is_told_so_and_the_others_complete(bench):
    queue, leases = await claimed(bench)
    await bench.outside.hset(bench.key("job:j60"), "status", "canceled")  # by a foreign gateway
    verdicts = await queue.settle([Outcome(lease, "complete", b"1") for lease in leases])
    lost = verdicts.pop(60)
    assert isinstance(lost, LeaseLost)
    assert lost.job_id == "j60"
    assert verdicts == [COMPLETED] * (COUNT - 1)
    assert (await bench.job("j60"))["status"] == "canceled"
    assert await noted(bench, "complete") == [f"j{n}" for n in range(COUNT) if n != 60]


@pytest.mark.clause("S-17")
async def test_many_sent_again_after_a_lost_answer_get_the_same_verdicts(bench):
    queue, leases = await claimed(bench)
    outcomes = [Outcome(lease, "complete") for lease in leases]
    first = await queue.settle(outcomes[: COUNT // 2])
    assert first == [COMPLETED] * (COUNT // 2)
    assert await queue.settle(outcomes) == [COMPLETED] * COUNT
    assert await queue.settle(outcomes) == [COMPLETED] * COUNT
    assert await noted(bench, "complete") == [f"j{n}" for n in range(COUNT)]


@pytest.mark.clause("S-15", "S-16")
async def test_each_outcome_of_a_mixed_batch_has_its_own_verdict_and_result(bench):
    queue, leases = await claimed(bench)
    outcomes = [
        Outcome(lease, "retry", failure=BOOM)
        if n % 7 == 3
        else Outcome(lease, "complete", b"%d" % (n // 10))
        for n, lease in enumerate(leases)
    ]
    verdicts = await queue.settle(outcomes)
    for number, verdict in enumerate(verdicts):
        again = number % 7 == 3
        assert isinstance(verdict, Retried if again else Completed)
        job = await bench.job(f"j{number}")
        assert job["status"] == ("queued" if again else "done")
        assert job["result"] == ("" if again else str(number // 10))


@pytest.mark.clause("S-8")
async def test_whoever_claims_has_the_scripts_to_settle_at_hand_if_he_may(bench):
    scripts = [SCRIPTS[name].sha for name in ("claim", "settle", "extend")]
    user = bench.ns.strip(":")
    rights = ("on", ">secret", "~*", "&*", "+@all", "-script")
    await bench.outside.execute_command("ACL", "SETUSER", user, *rights)
    await bench.outside.script_flush()
    barred = open_queue(bench.url().replace("://", f"://{user}:secret@"), worker_id="barred")
    assert await barred.claim(1, wait_ms=0) == []
    assert await bench.outside.script_exists(*scripts) == [True, False, False]
    await barred.close()
    assert await bench.queue("w1").claim(1, wait_ms=0) == []
    assert await bench.outside.script_exists(*scripts) == [True] * 3


@pytest.mark.clause("S-30")
async def test_ids_of_a_foreign_gateway_that_look_odd_are_noted_as_they_are(bench):
    """Ours are words; an id with a tab, which would end it in the journal, is set aside."""
    odd = ["with blank", "ü", "s", "ids", "a,b", "-", "*", "0-0", "{x}", '"', "ta\tb"]
    for job_id in odd:
        fields = {"status": "queued", "task": "chat", "payload": "{}", "ttl_s": "60"}
        await bench.outside.hset(bench.key(f"job:{job_id}"), mapping=fields)
        entry = {"job_id": job_id, "task": "chat", "payload": "{}"}
        await bench.outside.xadd(bench.key("jobs:stream"), entry)
    queue = bench.queue("w1", lease_ms=60_000)
    leases = await queue.claim(50, wait_ms=0)
    assert [record.job_id for record in queue.take_quarantined()] == ["ta?b"]
    odd.remove("ta\tb")
    assert [lease.job_id for lease in leases] == odd
    verdicts = await queue.settle([Outcome(lease, "complete") for lease in leases])
    assert verdicts == [COMPLETED] * len(odd)
    for job_id in odd:
        assert (await bench.job(job_id))["status"] == "done"
    assert await noted(bench, "complete") == odd


@pytest.mark.clause("S-30")
async def test_entries_of_before_are_read_among_those_of_now(bench):
    """A journal is older than the scripts that write it."""
    _, leases = await claimed(bench)
    key = bench.key("jobs:journal")
    (_, fields), *_ = await bench.outside.xrevrange(key, count=1)
    tail = fields["s"]
    words = ["s", tail, *(part for n in range(COUNT) for part in ("i", f"old{n}"))]
    await bench.outside.execute_command("XADD", key, "*", *words)
    told = await bench.journal().read(limit=100_000)
    old = [event for event in told if event.job_id.startswith("old")]
    new = [event for event in told if event.type == "claim"][: len(leases)]
    assert [event.job_id for event in old] == [f"old{n}" for n in range(COUNT)]
    assert [event.job_id for event in new] == [lease.job_id for lease in leases]
    assert {(event.type, event.task, event.ver, event.worker_id) for event in old + new} == {
        ("claim", "chat", 2, "w1")
    }
