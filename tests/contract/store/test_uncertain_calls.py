"""What an error says of a call that was sent again or took several steps."""

import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from tenure.contracts.bullmq import open_producer
from tenure.contracts.omniq.client import Client
from tenure.core.errors import ReplyLost, StoreUnreachable
from tenure.core.job import NewJob
from tenure.core.registry import open_queue
from tenure.store.redis import Redis
from tenure.store.resend import submit_with_retry
from tests.chaos.proxy import LossyProxy
from tests.waiting import until

_unique = itertools.count(1)


def _name() -> str:
    return f"u{os.getpid()}x{next(_unique)}"


def _is_script(command: Sequence[bytes]) -> bool:
    return command[0] in (b"EVAL", b"EVALSHA")


async def _bullmq_add(url: str, queue: str) -> None:
    producer = open_producer(f"bullmq+{url}?queue={queue}")
    try:
        await producer.add("job", {"n": 1})
    finally:
        await producer.close()


async def _omniq_publish(url: str, queue: str) -> None:
    async with Client(url) as client:
        await client.publish(queue, {"n": 1})


async def _surely(url: str, queue: str) -> None:
    opened = open_queue(f"streams+{url}?namespace={queue}", worker_id="w")
    try:
        await submit_with_retry(opened, [NewJob(task="job", payload=b"{}", job_id="j1")])
    finally:
        await opened.close()


async def _lengths(redis: Redis, queue: str) -> list[int]:
    """How many jobs wait, by the key in which each contract lets them wait."""
    commands = [
        ("LLEN", f"bull:{queue}:wait"),
        ("LLEN", f"{{{queue}}}:wait"),
        ("XLEN", f"{queue}jobs:stream"),
    ]
    return [int(reply) for reply in await redis.pipeline(commands)]


@pytest.mark.parametrize("add", [_bullmq_add, _omniq_publish, _surely])
async def test_a_lost_reply_whose_reconnect_fails_may_have_been_executed(
    redis: Redis, proxy: LossyProxy, add: Callable[[str, str], Awaitable[None]]
) -> None:
    """The job is there, so an error that promises the opposite would make a caller add it twice."""
    queue = _name()
    await add(proxy.url, queue)  # the scripts are known to the server from here on
    before = sum(await _lengths(redis, queue))
    queue = _name()
    proxy.drop_reply(when=_is_script, then_refuse=True)
    with pytest.raises(ReplyLost, match="may have been executed"):
        await add(proxy.url, queue)
    assert sum(await _lengths(redis, queue)) == before == 1


async def test_an_add_whose_reply_was_lost_is_sent_again_when_the_store_is_back(
    redis: Redis, proxy: LossyProxy
) -> None:
    queue = _name()
    proxy.drop_reply(when=_is_script)
    await _bullmq_add(proxy.url, queue)
    assert await redis.call("LLEN", f"bull:{queue}:wait") == 1


@pytest.mark.parametrize("contract", ["bullmq", "omniq", "streams"])
async def test_a_submit_of_two_batches_of_which_one_was_stored_is_in_doubt(
    proxy: LossyProxy, contract: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = "namespace" if contract == "streams" else "queue"
    queue = open_queue(f"{contract}+{proxy.url}?{word}={_name()}", worker_id="w")
    jobs = [NewJob(task="job", payload=b"{}", job_id=f"j-{n}") for n in range(501)]
    run = Redis.run

    async def run_and_lose_the_server(self: Redis, *args: Any, **named: Any) -> Any:
        reply = await run(self, *args, **named)
        proxy.refuse()
        await until(lambda: (main := self._node.main) is not None and main.lost)
        return reply

    monkeypatch.setattr(Redis, "run", run_and_lose_the_server)
    with pytest.raises(ReplyLost, match="an earlier part of the call was executed"):
        await queue.submit(jobs)
    await queue.close()


async def test_an_add_that_never_left_is_unreachable_not_in_doubt(proxy: LossyProxy) -> None:
    proxy.refuse()
    with pytest.raises(StoreUnreachable):
        await _bullmq_add(proxy.url, _name())
