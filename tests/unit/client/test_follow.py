"""A follower of events misses none, however slowly it is read."""

from __future__ import annotations

import asyncio

from tenure import Job, task
from tenure.testing import serving

EVENTS = 1_600


@task("flood")
async def flood(job: Job, count: int) -> int:
    for number in range(count):
        await job.report(type="token", data={"n": number})
    return count


async def test_a_slow_reader_gets_every_event_in_order_and_the_end() -> None:
    async with serving(flood) as queue:
        handle = await queue.client.submit(flood, count=EVENTS)
        seen: list[int] = []
        async with asyncio.timeout(30):
            async for event in handle.events():
                if event.type == "token":
                    seen.append(event.data["n"])
                    if len(seen) in (1, 1_200):  # more comes meanwhile than a follower holds
                        await handle.wait(timeout_s=30)
        assert seen == list(range(EVENTS))
        assert event.state == "done"


async def test_two_readers_of_one_job_get_the_same() -> None:
    async with serving(flood) as queue:
        handle = await queue.client.submit(flood, count=20)

        async def read() -> list[str]:
            return [event.id async for event in handle.events()]

        async with asyncio.timeout(10):
            first, second = await asyncio.gather(read(), read())
        assert first == second
        assert len(first) > 20


async def test_an_earlier_end_of_a_job_that_was_sent_back_is_not_the_last_event() -> None:
    async with serving(flood) as queue:
        handle = await queue.client.submit(flood, count=1)
        await handle.wait(timeout_s=5)
        await handle.retry()
        await handle.wait(timeout_s=5)
        async with asyncio.timeout(10):
            states = [event.state async for event in handle.events() if event.state]
        assert states == ["done", "done"]
