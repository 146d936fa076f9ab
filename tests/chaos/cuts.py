"""The network between workers and their plane is cut for longer than a lease, and mended again.

Nothing passes and nobody is told: what was on its way arrives when the network is back, long after
it is worth anything. A worker that is cut off must stop within its lease, by its own clock alone;
what it held must run elsewhere meanwhile; what it says afterwards must be refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from random import Random
from typing import NamedTuple

from tests.chaos.effects import Effect
from tests.chaos.herd import Member
from tests.chaos.load import Wanted, key_of
from tests.chaos.report import LONGEST_SEARCH_MS, SLACK_MS, Check, Report
from tests.chaos.stage import Setup, Stage
from tests.chaos.verdict import machine_of
from tests.contract.http_proxy import HttpProxy

KIND = "cut network"
# A handler that runs so many leases is still at work when its worker has to give it up.
LONG = 3
# How many of these are under way on average, in the whole herd: the others must have room for them.
LONG_HELD = 3
BATCH = 3
PAUSE_S = 0.15
# What has run for so long is no short job.
SURELY_LONG_MS = 400
LATE_MS = 1_000


class Cut(NamedTuple):
    """One cut, and what its worker had begun and not ended when it came."""

    begin_ms: int
    end_ms: int
    worker: str
    held: frozenset[tuple[str, int]]
    long: frozenset[tuple[str, int]]


async def cuts(setup: Setup, *, each: int = 1, shortest_ms: int = 0, longest_ms: int = 0) -> Report:
    """Each of the workers but one is cut off `each` times; without bounds as briefly as can be."""
    # A claim that a worker left waiting at the gateway may take the job once more, for a lease.
    shortest_ms = shortest_ms or 2 * setup.lease_ms + LONGEST_SEARCH_MS + SLACK_MS
    longest_ms = max(longest_ms, shortest_ms)
    async with Stage(setup) as stage, AsyncExitStack() as proxies:
        if not hasattr(stage.subject, "worker_url"):
            raise ValueError(f"workers of {setup.contract} go to their store: there is no such net")
        port = stage.add_gateway()
        stage.add_workers(1)
        lines = [await _behind(stage, port, proxies) for _ in range(setup.workers - 1)]
        over = asyncio.Event()
        feeding = asyncio.create_task(_feed(stage, over))
        rng = stage.rng("cuts")
        lengths = [[rng.randint(shortest_ms, longest_ms) for _ in range(each)] for _ in lines]
        rounds = [
            _cut_often(stage, proxy, member, for_ms)
            for (proxy, member), for_ms in zip(lines, lengths, strict=True)
        ]
        made = [cut for cuts_of_one in await asyncio.gather(*rounds) for cut in cuts_of_one]
        over.set()
        await feeding
        done, *_ = machine_of(setup.contract).final
        return await stage.judge(
            "cuts",
            expected={done: len(stage.load.wanted)},
            planned={KIND: each * len(lines)},
            more=[_stopped(stage, made), _ran_elsewhere(stage, made)],
        )


async def _behind(stage: Stage, port: int, proxies: AsyncExitStack) -> tuple[HttpProxy, Member]:
    """A worker that reaches the plane over a line of its own."""
    proxy = await HttpProxy(f"http://127.0.0.1:{port}").start()
    proxies.push_async_callback(proxy.stop)
    (member,) = stage.add_workers(1, url=f"plane+{proxy.url}?answer_ms={stage.setup.lease_ms}")
    return proxy, member


async def _feed(stage: Stage, over: asyncio.Event) -> None:
    jobs = _jobs(stage, stage.rng("jobs"), over)
    await stage.load.feed(stage.library(), jobs, batch=BATCH, ahead=stage.is_ahead, pause_s=PAUSE_S)


def _jobs(stage: Stage, rng: Random, over: asyncio.Event) -> Iterator[Wanted]:
    """Short ones, and some that outlast their lease several times; until it is enough."""
    n, long_ms = 0, LONG * stage.setup.lease_ms
    per_s = (1 + BATCH) / 2 / PAUSE_S
    share = LONG_HELD / (per_s * long_ms / 1000)
    while n < stage.setup.jobs or not over.is_set():
        short = rng.random() > share or over.is_set()
        ms = rng.randint(5, 120) if short else long_ms
        yield Wanted(key_of(rng), stage.subject.async_task, {"n": n, "do": "work", "ms": ms})
        n += 1


async def _cut_often(
    stage: Stage, proxy: HttpProxy, member: Member, lengths_ms: list[int]
) -> list[Cut]:
    made: list[Cut] = []
    for for_ms in lengths_ms:
        await stage.until(lambda: bool(_long(stage, member)), f"{member.name} has a long job")
        async with stage.faults.logged(KIND, member.worker, member.slots, [member]) as fault:
            proxy.cut(cut=True)
            stage.effects.refresh()
            held, long = stage.effects.open_of(member.worker), _long(stage, member)
            await asyncio.sleep(for_ms / 1000)
            proxy.cut(cut=False)
        cut = Cut(fault.begin_ms, fault.end_ms, member.worker, frozenset(held), frozenset(long))
        made.append(cut)
    return made


def _long(stage: Stage, member: Member) -> set[tuple[str, int]]:
    """What this worker is at, and must be long: it began some time ago and is not near its end."""
    held = stage.effects.open_of(member.worker)
    latest = max((effect.ms for effect in stage.effects.starts), default=0)
    window_ms = range(SURELY_LONG_MS, stage.setup.lease_ms)
    return {
        (effect.job_id, effect.fence)
        for effect in stage.effects.starts
        if (effect.job_id, effect.fence) in held and latest - effect.ms in window_ms
    }


def _stopped(stage: Stage, made: list[Cut]) -> Check:
    """Nothing of a worker that was cut off went on beyond its lease."""
    late: list[Effect] = []
    for cut in made:
        by_ms = cut.begin_ms + stage.setup.lease_ms + LATE_MS
        mine = [each for each in stage.effects.ends if each.worker_id == cut.worker]
        late += [each for each in mine if by_ms < each.ms < cut.end_ms]
        late += [each for each in mine if (each.job_id, each.fence) in cut.long]
    long = sum(len(cut.long) for cut in made)
    return Check(
        "workers that were cut off stopped within their lease",
        not late and all(cut.long for cut in made),
        f"{long} long handlers cut off in {len(made)} cuts, {len(late)} ended all the same",
    )


def _ran_elsewhere(stage: Stage, made: list[Cut]) -> Check:
    """What a worker held when it was cut off was begun by another before the network came back."""
    left = [
        (job_id, fence)
        for cut in made
        for job_id, fence in cut.held
        if not any(
            each.job_id == job_id and each.fence > fence and each.ms <= cut.end_ms
            for each in stage.effects.starts
        )
    ]
    held = sum(len(cut.held) for cut in made)
    return Check(
        "what they held ran elsewhere before the network was back",
        not left and bool(held),
        f"{held} jobs held, {len(left)} not begun again {left[:3]}",
    )
