"""Idempotency: one key is one job, under any storm, and for one requester only."""

import asyncio
import random

import pytest

from tenure.core.job import NewJob
from tests.contract.inbox.conftest import RawSql
from tests.contract.inbox_stage import InboxStage
from tests.contract.suite.acting import claim_one, job, settle, submit

KEYS, POSTS = 500, 20


@pytest.mark.clause("I-3")
async def test_twenty_posts_of_each_of_five_hundred_keys_make_five_hundred_jobs(
    inbox: InboxStage,
) -> None:
    queues = [inbox.queue() for _ in range(4)]
    chance = random.Random(11)

    def posts() -> list[NewJob]:
        keys = chance.sample(range(KEYS), KEYS)
        return [
            NewJob(task="t", payload=b'{"k":%d}' % k, idempotency_key=f"k{k}", requester="r")
            for k in keys
        ]

    batches = [posts() for _ in range(POSTS)]
    answers = await asyncio.gather(
        *(queues[n % 4].submit(batch) for n, batch in enumerate(batches))
    )
    ids: dict[str, set[str]] = {}
    created = 0
    for batch, replies in zip(batches, answers, strict=True):
        for sent, reply in zip(batch, replies, strict=True):
            assert reply.accepted, reply
            ids.setdefault(sent.idempotency_key, set()).add(reply.job_id)
            created += reply.status == "created"
    assert created == len(ids) == KEYS
    assert all(len(found) == 1 for found in ids.values())
    assert (await inbox.ledger.counts()).states["queued"] == KEYS


@pytest.mark.clause("I-2", "I-3")
async def test_a_batch_may_name_one_job_twice(inbox: InboxStage) -> None:
    queue = inbox.queue()
    same = {"idempotency_key": "again", "payload": b"{}"}
    answers = await queue.submit(
        [job("b1", **same), job("b2", **same), job("b1", **same), job("b3", payload=b"[]")]
    )
    assert [answer.status for answer in answers] == ["created", "replayed", "replayed", "created"]
    assert [answer.job_id for answer in answers] == ["b1", "b1", "b1", "b3"]
    other = job("b4", idempotency_key="again", payload=b"[1]")
    (conflict,) = await queue.submit([other])
    assert conflict.status == "conflict"
    assert await inbox.ledger.get("b4") is None


@pytest.mark.clause("I-2", "I-3")
async def test_a_job_is_stored_if_the_one_before_it_with_its_id_was_refused(
    inbox: InboxStage,
) -> None:
    queue = inbox.queue()
    await submit(queue, job("c0", idempotency_key="taken", payload=b"[0]"))
    refused = [job("c1", idempotency_key="taken", payload=b"[1]")] * 600
    kept = job("c1", idempotency_key="free", payload=b"[1]")
    answers = await queue.submit([*refused, *[kept] * 600])
    statuses = ["conflict"] * 600 + ["created"] + ["replayed"] * 599
    assert [answer.status for answer in answers] == statuses


@pytest.mark.clause("I-3")
@pytest.mark.options(idempotency_ttl_s=1)
async def test_an_expired_key_goes_with_its_job_and_never_before(
    inbox: InboxStage, sql: RawSql
) -> None:
    queue = inbox.queue("w1")
    await submit(queue, job("live", idempotency_key="live"), job("done", idempotency_key="done"))
    await claim_one(queue)
    lease = await claim_one(queue)
    await settle(queue, lease, "complete")
    await inbox.advance(1_000)
    await inbox.queue().upkeep()
    left = await sql("SELECT idempotency_key FROM idempotency_keys WHERE job_id IN ('live','done')")
    assert left == [("live",)]
