"""A primary is replaced under load: on a cluster of three and three, and by Sentinels.

report = await failover(Setup(folder=tmp, topology="cluster", replicas=1))
assert report.ok, report

Submits wait for replicas, and what was acknowledged must not be lost, whichever of these comes: a
planned failover, kill -9 of the primary, a move of the busy slot, and replicas that have lagged
behind when their primary is killed. What no replica has may be lost; its client was told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tests.chaos.history import REPLACED
from tests.chaos.report import WORKS_AGAIN_WITHIN_MS, Report
from tests.chaos.scenario import all_done, endless
from tests.chaos.stage import Setup, Stage
from tests.chaos.topology import TopologySubject
from tests.redis_topologies import Server, until

WAYS = {
    "cluster": ("planned failover", "kill primary", "move slot", "lagging replica"),
    "sentinel": ("planned failover", "kill primary", "lagging replica"),
}
LANES = 2
# Handlers are slower than the clients, so that there is work while nothing can be submitted: after
# a primary was killed there may be too few replicas for a while.
WORK_MS = (100, 400)
BACKLOG = 150
RAN_MEANWHILE = 20
WHOLE_WITHIN_S = 90.0


async def failover(setup: Setup, *, each: int = 1, ways: Sequence[str] = ()) -> Report:
    """Each of the ways so many times, in an order that the seed decides."""
    order = [*(ways or WAYS[setup.topology])] * each
    async with Stage(setup) as stage:
        stage.rng("order").shuffle(order)
        over = asyncio.Event()
        stage.add_workers()
        jobs = endless(stage, stage.rng("jobs"), over, WORK_MS)
        feeds = [
            stage.load.feed(stage.library(), jobs, batch=6, ahead=lambda: _backlog(stage) > BACKLOG)
            for _ in range(LANES)
        ]
        feeding = asyncio.gather(*feeds)
        for way in order:
            await _ready(stage)
            await _Strike(stage, await _primary(stage)).carry_out(way)
        over.set()
        await feeding
        planned = {way: order.count(way) for way in REPLACED}
        lagging = order.count("lagging replica")
        planned |= {
            "kill primary": planned["kill primary"] + lagging,
            "cut replicas": lagging,
        }
        return await stage.judge("failover", expected=all_done(stage), planned=planned)


async def _ready(stage: Stage) -> None:
    """All servers are in step, all workers are at work, and there is more for them to do."""
    whole = _subject(stage).servers.is_whole
    await asyncio.to_thread(until, whole, "all servers are in step", WHOLE_WITHIN_S)
    acked, since = len(stage.load.acked), time.time_ns() // 1_000_000
    await stage.until(
        lambda: (
            len(stage.load.acked) > acked + RAN_MEANWHILE
            and _backlog(stage) > BACKLOG
            and _all_started(stage, since)
        ),
        "workers and clients are busy",
    )


def _backlog(stage: Stage) -> int:
    return len(stage.load.acked) - len(stage.effects.finished)


def _all_started(stage: Stage, since_ms: int) -> bool:
    """Whether every worker has begun a job since then."""
    at_work = {effect.worker_id for effect in stage.effects.starts if effect.ms > since_ms}
    return at_work >= {member.worker for member in stage.herd.workers()}


def _subject(stage: Stage) -> TopologySubject:
    assert isinstance(stage.subject, TopologySubject)
    return stage.subject


async def _primary(stage: Stage) -> Server:
    """The server that has the queue now."""
    subject = _subject(stage)
    return await asyncio.to_thread(subject.servers.owner, subject.slot)


class _Strike:
    """One fault, and back to work."""

    def __init__(self, stage: Stage, primary: Server) -> None:
        subject = _subject(stage)
        self._stage = stage
        self._slot = subject.slot
        self._servers = subject.servers
        self._primary = primary

    async def carry_out(self, way: str) -> None:
        """Do the harm, and wait until every worker is at work again."""
        stage = self._stage
        match way:
            case "planned failover":
                await self._log(way, lambda: self._servers.fail_over(self._slot))
            case "move slot":
                await self._log(way, self._move)
            case "kill primary":
                await self._log(way, self._kill)
            case "lagging replica":
                await self._lag()
                await self._log("kill primary", self._kill)
        ended_ms = stage.faults.injected[-1].end_ms
        await asyncio.to_thread(self._primary.start_again)
        with suppress(TimeoutError):  # the report says so
            await stage.until(
                lambda: _all_started(stage, ended_ms),
                "every worker works again",
                within_s=WORKS_AGAIN_WITHIN_MS * 2 / 1000,
            )

    async def _log(self, kind: str, harm: Callable[[], Any]) -> None:
        herd = self._stage.herd
        name = f"the server at {self._primary.port}"
        async with self._stage.faults.logged(kind, name, herd.slots, herd.workers()):
            await asyncio.to_thread(harm)

    async def _lag(self) -> None:
        """Work goes on at the primary, and its replicas know nothing of it."""
        stage, begun = self._stage, len(self._stage.effects.finished)
        herd = stage.herd
        name = f"the replicas of {self._primary.port}"
        async with stage.faults.logged("cut replicas", name, herd.slots, herd.workers()):
            await asyncio.to_thread(self._primary.cut_replicas)
            await stage.until(
                lambda: len(stage.effects.finished) > begun + RAN_MEANWHILE, "work goes on"
            )

    def _kill(self) -> None:
        self._primary.kill()
        until(
            lambda: self._servers.owner(self._slot) is not self._primary, "another primary is there"
        )

    def _move(self) -> None:
        source, target = self._servers.begin_move(self._slot)
        while self._servers.move_keys(self._slot, source, target, 50):
            time.sleep(0.01)  # a real migration takes its time: here the slot is in between
        self._servers.end_move(self._slot, source, target)
