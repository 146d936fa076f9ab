"""Pause, add and resume by clients of different majors: no job may be lost while we are there.

5.x keeps paused jobs in another list than 6.x, and resumes by renaming one list over the other. Two
of the eight mixes of pauser, adder and resumer lose a job when Node is alone; a worker of ours puts
all jobs into one list as soon as it sees the event of the add.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest
import redis

from tenure.contracts.bullmq import open_producer
from tenure.core.registry import open_ledger, open_queue
from tests.interop.bullmq.ours import worker
from tests.interop.bullmq.peer import Node
from tests.waiting import until

pytestmark = pytest.mark.clause("B-16", "B-34")
WHO = ("5", "6", "ours")
MIXES = list(itertools.product(WHO, repeat=3))


@pytest.mark.parametrize(("pauser", "adder", "resumer"), MIXES, ids=["-".join(m) for m in MIXES])
async def test_no_job_is_lost_whoever_pauses_adds_and_resumes(
    nodes: Callable[[int], Node],
    name: str,
    url: str,
    raw: redis.Redis,
    pauser: str,
    adder: str,
    resumer: str,
) -> None:
    producer, ledger = open_producer(url), open_ledger(url)

    async def act(who: str, verb: str) -> None:
        if who == "ours":
            await (producer.add("work", {}) if verb == "add" else getattr(ledger, verb)())
        else:
            args = ("work", {}) if verb == "add" else ()
            await nodes(int(who)).acall(f"queue:{name}", verb, *args)

    async def one_list() -> bool:
        return not raw.exists(f"bull:{name}:paused")

    for who in ("5", "6"):  # opened before, so that nothing but the mix is tested
        await nodes(int(who)).acall(f"queue:{name}", "count")
    await act(pauser, "pause")
    async with worker(url):
        await act(adder, "add")
        await until(one_list, "our worker has seen to it that there is one list")
        await act(adder, "add")
        await until(one_list, "our worker has seen to it that there is one list")
        assert raw.llen(f"bull:{name}:wait") == 2
        await act(resumer, "resume")
        await until(lambda: raw.zcard(f"bull:{name}:completed") == 2, "both jobs are done")
    await producer.close()
    await ledger.close()


async def test_our_pause_holds_node_and_nodes_pause_holds_us(
    node: Node, name: str, url: str
) -> None:
    ledger, queue = open_ledger(url), open_queue(url, worker_id="w")
    await node.acall(f"queue:{name}", "add", "work", {})
    await ledger.pause()
    assert await node.acall(f"queue:{name}", "isPaused") is True
    taken = await node.acall(f"worker:{name}", "getNextJob", "token", {"block": False})
    assert taken is None
    await ledger.resume()
    await node.acall(f"queue:{name}", "pause")
    assert await queue.claim(1, wait_ms=30) == []
    waiting = asyncio.create_task(queue.claim(1, wait_ms=10_000))
    await asyncio.sleep(0.05)  # lets the claim begin to wait; if it has not, it finds the job
    await node.acall(f"queue:{name}", "resume")
    assert len(await asyncio.wait_for(waiting, 5)) == 1
    await ledger.close()
    await queue.close()
