"""The scenarios: each puts a herd under load, does its harm, and returns the judgement.

report = await kills(Setup(folder=tmp, seed=7, jobs=5_000))
assert report.ok, report
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

from tests.chaos.faults import plan
from tests.chaos.herd import Member
from tests.chaos.history import read_journal, read_settles
from tests.chaos.load import Wanted, key_of
from tests.chaos.proxy import LossyProxy
from tests.chaos.report import Check, Report
from tests.chaos.stage import LOOK_EVERY_S, Setup, Stage
from tests.chaos.verdict import machine_of

HTTP_LANES = 6
LIBRARY_LANES = 2


def mixed(stage: Stage, rng: Random, count: int) -> Iterator[Wanted]:
    """Jobs of many kinds: short and long, in the loop and in threads, with news and failures."""
    subject = stage.subject
    for n in range(count):
        chance, task, options = rng.random(), subject.async_task, {}
        payload: dict[str, Any] = {"n": n, "do": "work", "ms": rng.randint(1, 25)}
        if chance < 0.10:
            payload |= {"do": "report", "ms": 30}
        elif chance < 0.15:
            payload |= {"do": "fail_once"}
            options = dict(subject.retries)
        elif chance < 0.25:
            task = subject.thread_task
        elif chance < 0.29:
            payload |= {"ms": rng.randint(100, 400)}
        yield Wanted(key_of(rng), task, payload, options)


async def kills(setup: Setup, **counts: int) -> Report:
    """kill -9 of workers, gateway and store under load; half the jobs come through the gateway.

    A stubborn holder is stopped beyond its lease meanwhile, so that there are stale owners at all.
    A contract without an HTTP side gets all its jobs from the library, and a file is no process
    that could be killed.
    """
    wanted = {
        "kill worker": counts.get("worker", max(2, setup.jobs // 800)),
        "kill gateway": counts.get("gateway", max(1, setup.jobs // 1_600)),
        "kill store": counts.get("store", max(1, setup.jobs // 1_600)),
        "stop worker": counts.get("stop", max(1, setup.jobs // 2_500)),
    }
    wanted = {kind: count for kind, count in wanted.items() if count}
    async with Stage(setup) as stage:
        if not stage.subject.jobs_path:
            wanted.pop("kill gateway", None)
        if stage.subject.store_url.startswith("sqlite:"):
            wanted.pop("kill store", None)
        stage.add_workers()
        stage.add_stubborn(1, slots=4, work_ms=setup.lease_ms // 3)
        feeding = asyncio.gather(*_feeds(stage))
        planned = plan(stage.rng("plan"), wanted)
        await stage.faults.follow(planned, lambda: len(stage.effects.finished) / setup.jobs)
        await asyncio.wait_for(feeding, setup.patience_s)
        more = [await _stale_refused(stage, least=1)]
        if "kill gateway" in wanted:
            more.append(_killed_while_posting(stage, wanted["kill gateway"]))
        return await stage.judge("kills", expected=all_done(stage), planned=wanted, more=more)


def _feeds(stage: Stage) -> list[Coroutine[Any, Any, None]]:
    """Clients that hand in all jobs, half of them over HTTP where there is a gateway to take them.

    Lanes of a kind draw from one source.
    """
    jobs, load = stage.setup.jobs, stage.load
    half = jobs // 2 if stage.subject.jobs_path else 0
    direct = mixed(stage, stage.rng("direct"), jobs - half)
    feeds = [
        load.feed(stage.library(), direct, batch=12, ahead=stage.is_ahead)
        for _ in range(LIBRARY_LANES)
    ]
    if half:
        port = stage.add_gateway()
        posted = mixed(stage, stage.rng("posted"), half)
        feeds += [
            load.feed(stage.http(port), posted, ahead=stage.is_ahead) for _ in range(HTTP_LANES)
        ]
    return feeds


def _killed_while_posting(stage: Stage, planned: int) -> Check:
    posting = sum(stage.was_posting(fault) for fault in stage.faults.injected)
    return Check(
        "gateways were killed while clients posted",
        posting == planned,
        f"{posting} of {planned} kills",
    )


def all_done(stage: Stage, *, failed: int = 0) -> dict[str, int]:
    """How many jobs shall be in which final state."""
    done, buried, *_ = machine_of(stage.setup.contract).final
    return {done: len(stage.load.wanted) - failed, buried: failed}


async def stops(setup: Setup, *, each: int = 3) -> Report:
    """SIGSTOP beyond the lease, of real workers and of holders that write late on purpose."""
    async with Stage(setup) as stage:
        workers = stage.add_workers()
        stubborn = _add_late(stage)
        return await _stop_all("stops", stage, [*workers[:2], *stubborn], each, pause_s=0.1)


async def latecomers(setup: Setup, *, each: int = 1) -> Report:
    """Late writes that meet a rival at work: jobs last, and only holders that write late stop."""
    async with Stage(setup) as stage:
        stage.add_workers()
        span = (setup.lease_ms * 2, setup.lease_ms * 5 // 2)
        late = _add_late(stage)
        return await _stop_all(
            "latecomers", stage, late, each, pause_s=0.4, work_ms=span, leases=(2.4, 3.0)
        )


def _add_late(stage: Stage) -> list[Member]:
    return stage.add_stubborn(2, slots=4, work_ms=stage.setup.lease_ms // 3)


async def _stop_all(
    name: str,
    stage: Stage,
    members: Sequence[Member],
    each: int,
    *,
    pause_s: float,
    work_ms: tuple[int, int] = (5, 120),
    leases: tuple[float, float] = (1.5, 3.0),
) -> Report:
    over = asyncio.Event()
    jobs = endless(stage, stage.rng("jobs"), over, work_ms)
    feed = stage.load.feed(stage.library(), jobs, batch=6, pause_s=pause_s)
    feeding = asyncio.create_task(feed)
    rng = stage.rng("stops")
    await asyncio.gather(*(_stop_often(stage, each, member, rng, leases) for member in members))
    over.set()
    await feeding
    late = await _stale_refused(stage, least=each)
    planned = {"stop worker": len(members) * each}
    return await stage.judge(name, expected=all_done(stage), planned=planned, more=[late])


async def _stale_refused(stage: Stage, *, least: int) -> Check:
    """Every lease of a stubborn holder that ran out was written to late, and in vain."""
    quiet = await stage.quiesce()
    late = await _late_writes(stage)
    patience_s = min(10.0, stage.setup.patience_s) if quiet else LOOK_EVERY_S
    with suppress(TimeoutError):  # what is not answered by then is seen below
        await stage.until(
            lambda: late <= _answered(stage), "late writes are answered", within_s=patience_s
        )
    refused = [seen for seen in read_settles(stage.folder) if seen.answer == "LeaseLost"]
    return Check(
        "stale owners wrote, and all were refused",
        len(late) >= least and late <= {(seen.job_id, seen.fence) for seen in refused},
        f"{len(late)} late outcomes sent, {len(refused)} refused",
    )


async def _stop_often(
    stage: Stage, times: int, member: Member, rng: Random, leases: tuple[float, float]
) -> None:
    for _ in range(times):
        for_ms = round(stage.setup.lease_ms * rng.uniform(*leases))
        await stage.until(
            lambda: bool(stage.effects.open_of(member.worker)), f"{member.name} holds a job"
        )
        await stage.faults.stop_worker(member, for_ms)


async def _late_writes(stage: Stage) -> set[tuple[str, int]]:
    """Job and fence of every lease of a stubborn holder that ran out: each is written to late.

    A lease that ran out before the answer that carried it came is not among them: nobody held it.
    """
    events = await read_journal(stage.subject.url())
    stage.effects.refresh()
    held = {(row.job_id, row.fence) for row in stage.effects.starts}
    return held & {
        (event.job_id, event.fence)
        for event in events
        if event.type == "reap" and event.worker_id.startswith("stubborn")
    }


def _answered(stage: Stage) -> set[tuple[str, int]]:
    return {(seen.job_id, seen.fence) for seen in read_settles(stage.folder)}


def endless(
    stage: Stage, rng: Random, over: asyncio.Event, work_ms: tuple[int, int]
) -> Iterator[Wanted]:
    """Jobs until told that it is enough, but not fewer than the run's size."""
    n = 0
    while n < stage.setup.jobs or not over.is_set():
        payload = {"n": n, "do": "work", "ms": rng.randint(*work_ms)}
        yield Wanted(key_of(rng), stage.subject.async_task, payload)
        n += 1


async def lost_replies(setup: Setup, *, each: int = 30) -> Report:
    """Each verb is executed and its answer lost, `each` times or more."""
    async with Stage(setup) as stage:
        rng = stage.rng("losses")
        proxies = [LossyProxy(stage.subject.store_url) for _ in range(setup.workers + 1)]
        try:
            for proxy in proxies:
                await proxy.start()
            return await _lose(stage, proxies, each, rng)
        finally:
            for proxy in proxies:
                await proxy.stop()


async def _lose(stage: Stage, proxies: list[LossyProxy], each: int, rng: Random) -> Report:
    front, *behind = proxies
    for proxy in behind:
        stage.add_workers(1, url=stage.subject.url(proxy.url))
    over = asyncio.Event()
    jobs = _talkative(stage, stage.rng("jobs"), over)
    feeding = asyncio.create_task(
        stage.load.feed(stage.library(front.url), jobs, batch=3, pause_s=0.05)
    )
    losses = [_lose_often(stage, front, "load", ["submit"] * each, rng)]
    share = -(-each // len(behind))
    for proxy, member in zip(behind, stage.herd.workers(), strict=True):
        verbs = ["claim", "extend", "report", "settle"] * share
        rng.shuffle(verbs)
        losses.append(_lose_often(stage, proxy, member.name, verbs, rng))
    await asyncio.gather(*losses)
    over.set()
    await feeding
    planned = {
        f"lost reply: {verb}": each for verb in ("submit", "claim", "extend", "report", "settle")
    }
    await stage.quiesce()
    stage.effects.refresh()
    ran = len(stage.effects.starts) - len({effect.job_id for effect in stage.effects.starts})
    once = Check("every handler ran once", ran == 0, f"{ran} ran again")
    return await stage.judge("lost-replies", expected=all_done(stage), planned=planned, more=[once])


async def _lose_often(
    stage: Stage, proxy: LossyProxy, target: str, verbs: list[str], rng: Random
) -> None:
    for verb in verbs:
        await stage.faults.lose_reply(proxy, verb, target, stage.setup.concurrency)
        # Two lost extends in a row are survived, three are not meant to be: let one through.
        calm_s = stage.setup.lease_ms / 2500 if verb == "extend" else rng.uniform(0, 0.05)
        await asyncio.sleep(calm_s)


def _talkative(stage: Stage, rng: Random, over: asyncio.Event) -> Iterator[Wanted]:
    """Jobs that use every verb: some report, some last long enough to be extended."""
    n = 0
    while n < stage.setup.jobs or not over.is_set():
        payload: dict[str, Any] = {"n": n, "do": "work", "ms": rng.randint(5, 40)}
        if n % 2:
            payload |= {"do": "report", "ms": 60}
        elif n % 4 == 0:
            payload |= {"ms": stage.setup.lease_ms * 2 // 3}
        yield Wanted(key_of(rng), stage.subject.async_task, payload)
        n += 1


async def blocking(setup: Setup) -> Report:
    """Handlers that block the loop, or the processor, for three leases, beside idle rivals."""
    async with Stage(setup) as stage:
        stage.add_workers()
        rng, subject = stage.rng("jobs"), stage.subject
        ms = setup.lease_ms * 3 + 200
        blockers = [
            Wanted(key_of(rng), task, {"n": n, "do": do, "ms": ms})
            for n, (task, do) in enumerate(
                (task, do)
                for do in ("block", "spin")
                for task in (subject.async_task, subject.thread_task)
            )
        ]
        others = [
            Wanted(key_of(rng), subject.async_task, {"n": n, "do": "work", "ms": 10})
            for n in range(len(blockers), setup.jobs)
        ]
        for job in blockers:
            # What a claim brings while the loop is blocked is not known to its worker in time.
            stage.faults.note("blocked worker", job.task, setup.concurrency)
        await stage.load.feed(stage.library(), blockers, batch=len(blockers))
        await stage.load.feed(stage.library(), others, batch=5)
        await stage.quiesce()
        events = await read_journal(subject.url())
        ids = [stage.load.acked[job.key] for job in blockers]
        stage.effects.refresh()
        ran = {row.job_id: row.fence for row in stage.effects.starts}
        under = [[e.type for e in events if (e.job_id, e.fence) == (j, ran.get(j))] for j in ids]
        kept = [types.count("extend") for types in under]
        more = [
            Check(
                "blocked handlers kept their lease to the end",
                min(kept) >= 3 and all("complete" in t and "reap" not in t for t in under),
                f"extended {kept} times",
            ),
            Check(
                "every job ran once",
                len(stage.effects.starts) == len(stage.load.wanted),
                f"{len(stage.effects.starts)} starts of {len(stage.load.wanted)} jobs",
            ),
        ]
        planned = {"blocked worker": len(blockers)}
        return await stage.judge("blocking", expected=all_done(stage), planned=planned, more=more)


async def poison(
    setup: Setup, *, poisons: int = 2, lost_max: int = 3, after_ms: int = 300
) -> Report:
    """Jobs that kill whichever worker runs them, among healthy ones."""
    async with Stage(setup, lost_max=lost_max) as stage:
        stage.add_workers()
        rng, task = stage.rng("jobs"), stage.subject.async_task
        bad = [
            Wanted(key_of(rng), task, {"n": n, "do": "exit", "ms": after_ms})
            for n in range(poisons)
        ]
        good = [
            Wanted(key_of(rng), task, {"n": n, "do": "work", "ms": rng.randint(5, 30)})
            for n in range(poisons, setup.jobs)
        ]
        jobs = bad + good
        rng.shuffle(jobs)
        await stage.load.feed(stage.library(), jobs, batch=10, pause_s=0.02)
        await stage.quiesce()
        events = await read_journal(stage.subject.url())
        ids = {stage.load.acked[job.key] for job in bad}
        starts = [sum(e.type == "claim" and e.job_id == id_ for e in events) for id_ in ids]
        buried = {e.job_id for e in events if e.type == "bury" and e.error_code == "lease_lost"}
        more = [
            Check("poison ended with the reason lease_lost", buried == ids, f"{len(buried)} did"),
            Check(
                "at its limit",
                set(starts) == {stage.subject.claims_until_lost(lost_max)},
                f"after {starts} starts",
            ),
        ]
        return await stage.judge(
            "poison" if after_ms else "poison-at-once",
            expected=all_done(stage, failed=poisons),
            planned={"death": lost_max},
            deaths=range(lost_max, poisons * lost_max + 1),
            more=more,
        )


async def emptied(setup: Setup) -> Report:
    """The store comes back empty: workers and gateway go on with new jobs, without a restart."""
    async with Stage(setup) as stage:
        stage.add_workers()
        rng = stage.rng("jobs")
        port = stage.add_gateway() if stage.subject.jobs_path else 0
        if port:
            await stage.load.feed(stage.http(port), mixed(stage, rng, 20))
        await stage.load.feed(stage.library(), mixed(stage, rng, 200), batch=50)
        pids = {name: member.pid for name, member in stage.herd.members.items()}
        await stage.until(lambda: len(stage.effects.finished) > 20, "workers at work")
        await stage.faults.kill_store(down_ms=300, wipe=True)
        stage.load.close()
        stage.load = stage.new_load()
        half = setup.jobs // 2
        feeds = [stage.load.feed(stage.library(), mixed(stage, rng, half), batch=10)]
        if port:
            feeds.append(stage.load.feed(stage.http(port), mixed(stage, rng, half)))
        await asyncio.gather(*feeds)
        await stage.quiesce()
        same = {name: member.pid for name, member in stage.herd.members.items()} == pids
        more = [Check("nobody was restarted", same, f"{len(pids)} processes")]
        return await stage.judge(
            "emptied", expected=all_done(stage), planned={"empty store": 1}, more=more
        )


SCENARIOS: dict[str, Callable[[Setup], Coroutine[Any, Any, Report]]] = {
    "kills": kills,
    "stops": stops,
    "latecomers": latecomers,
    "lost-replies": lost_replies,
    "blocking": blocking,
    "poison": poison,
    "poison-at-once": partial(poison, after_ms=0),
    "emptied": emptied,
}
