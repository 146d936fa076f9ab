"""Garbage in the store: a hostile writer works on a live queue while good jobs flow through it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from tenure.core.errors import TenureError
from tenure.core.registry import open_ledger
from tenure.core.seam import Query
from tests.chaos.effects import now_ms
from tests.chaos.history import STARVED
from tests.chaos.hostile import Writer, writer_of
from tests.chaos.load import Wanted, key_of
from tests.chaos.report import SLACK_MS, Check
from tests.chaos.stage import Setup, Stage
from tests.chaos.verdict import machine_of
from tests.waiting import until

BATCH = 5
DELAY_MS_MAX = 1_000
NOTED_EVERY = 1_000  # a quarantine keeps the last 10,000 records
# A lock or a group of no job stops nothing, and a hostile record may be due in a thousand years.
HARMLESS = (
    "locks",
    "groups",
    "delayed",
    "idx:delayed",
    "stats",
    "delayed jobs",
    "bull:jobs:delayed",
)


class Outcome(msgspec.Struct, kw_only=True):
    """What came of a run."""

    contract: str
    seed: int
    rounds: int
    jobs: int
    set_aside: int
    checks: list[Check]

    @property
    def ok(self) -> bool:
        """Every check held."""
        return all(check.ok for check in self.checks)

    def as_json(self) -> bytes:
        """For machines."""
        return msgspec.json.format(
            msgspec.json.encode({"ok": self.ok, **msgspec.to_builtins(self)})
        )

    def __str__(self) -> str:
        head = f"garbage on {self.contract}: {'PASSED' if self.ok else 'FAILED'}"
        about = f"  seed {self.seed}, {self.rounds} rounds, {self.jobs} good jobs"
        lines = [f"  {'ok  ' if c.ok else 'FAIL'} {c.claim}: {c.text}" for c in self.checks]
        return "\n".join([head, about, *lines])


async def garbage(
    setup: Setup, *, rounds: int = 200, seconds: float = 0, per_s: float = 1_000
) -> Outcome:
    """Rounds of a hostile writer, with good jobs beside them until they are over.

    `rounds` of them and at least `setup.jobs` jobs; or as many as fit into `seconds`, with at most
    `per_s` rounds and half as many jobs each second.
    """
    async with Stage(setup) as stage:
        if stage.subject.jobs_path:
            stage.add_gateway()
        stage.add_workers()
        rng = stage.rng("hostile")
        writer = writer_of(stage.subject, rng)
        try:
            await _under_way(stage)
            sent_ms: dict[str, int] = {}
            over = asyncio.Event()
            feeding = asyncio.create_task(_feed(stage, sent_ms, over, per_s / 2))
            began, done = time.monotonic(), 0
            while time.monotonic() < began + seconds if seconds else done < rounds:
                await writer.round()
                done += 1
                if done % NOTED_EVERY == 0:
                    await writer.set_aside()
                await asyncio.sleep(began + done / per_s - time.monotonic())
            over.set()
            with suppress(TimeoutError):  # the checks tell what is missing
                await asyncio.wait_for(feeding, setup.patience_s)
            await _finished(stage, writer)
            return await _judge(stage, writer, done, sent_ms)
        finally:
            await writer.close()


async def _under_way(stage: Stage) -> None:
    """The first good job is done: workers and gateway are up."""
    first = Wanted(key_of(stage.rng("first")), stage.subject.async_task, {"n": -1, "ms": 1})
    await stage.load.feed(stage.library(), [first])
    await stage.until(lambda: first.key in stage.effects.finished, "the workers are up")


async def _feed(stage: Stage, sent_ms: dict[str, int], over: asyncio.Event, per_s: float) -> None:
    """Good jobs until the attack is over, and at least as many as the run's size."""
    rng = stage.rng("jobs")
    began = time.monotonic()

    def good() -> Iterator[Wanted]:
        n = 0
        while n < stage.setup.jobs or not over.is_set():
            payload = {"n": n, "do": "work", "ms": rng.randint(1, 15)}
            job = Wanted(key_of(rng), stage.subject.async_task, payload)
            sent_ms[job.key] = now_ms()
            yield job
            n += 1

    def is_ahead() -> bool:
        on_time = len(sent_ms) <= per_s * (time.monotonic() - began) + BATCH
        return not on_time or _backlog(stage) > stage.setup.workers * stage.setup.concurrency

    await stage.load.feed(stage.library(), good(), batch=BATCH, ahead=is_ahead)


def _backlog(stage: Stage) -> int:
    return len(stage.load.acked) - len(stage.effects.finished & set(stage.load.acked.values()))


async def _finished(stage: Stage, writer: Writer) -> None:
    """Every good job has ended and the lanes are empty, or patience has ended: the checks tell."""

    since_ms = 0

    async def empty() -> bool:
        """For longer than the writer delays a record: what was delayed is in no lane either."""
        nonlocal since_ms
        if any((await _residue(stage)).values()):
            since_ms = 0
            return False
        since_ms = since_ms or now_ms()
        return now_ms() - since_ms > DELAY_MS_MAX

    with suppress(TimeoutError, AssertionError):
        await stage.until(lambda: _backlog(stage) <= 0, "good jobs end")
        await until(lambda: _all_aside(writer), within_s=stage.setup.patience_s)
        if not writer.leaves_rows:
            await until(empty, within_s=stage.setup.patience_s)


async def _all_aside(writer: Writer) -> bool:
    return await writer.met() <= (await writer.set_aside()).keys()


async def _judge(stage: Stage, writer: Writer, rounds: int, sent_ms: dict[str, int]) -> Outcome:
    stage.effects.refresh()
    states, unreadable = await _states(stage)
    codes = await stage.herd.end(kindly=True)
    stage.effects.refresh()
    good = set(stage.load.acked.values())
    ends = Counter(effect.job_id for effect in stage.effects.ends if effect.job_id in good)
    ended_ms = {effect.job_id: effect.ms for effect in stage.effects.ends}
    slow = {
        key: ended_ms[job_id] - sent_ms[key]
        for key, job_id in stage.load.acked.items()
        if key in sent_ms and job_id in ended_ms
    }
    starved = [fault for fault in stage.faults.injected if fault.kind == STARVED]
    starved_ms = sum(fault.end_ms - fault.begin_ms for fault in starved)
    limit_ms = stage.setup.lease_ms + SLACK_MS + starved_ms
    late = [key for key, ms in slow.items() if ms > limit_ms]
    done = machine_of(stage.setup.contract).final[0]
    wrong = Counter(state for state in states.values() if state != done)
    deaths = stage.faults.by_kind.get("death", 0)
    aside = await writer.set_aside()
    met = await writer.met()
    missing = [bad for bad in met if not aside.get(bad)]
    residue = await _residue(stage)
    checks = [
        Check(
            "every good job was taken",
            len(good) == len(stage.load.wanted),
            f"{len(good)} of {len(stage.load.wanted)}",
        ),
        Check("every good job is done", not wrong and len(states) == len(good), f"{dict(wrong)}"),
        Check(
            "each ran to its end once",
            ends.keys() == good and set(ends.values()) <= {1},
            f"{sum(ends.values())} ends of {len(good)} jobs",
        ),
        Check(
            "none waited longer than a lease",
            not late,
            f"{len(late)} did; the longest {max(slow.values(), default=0)} ms of {limit_ms}",
        ),
        Check("no process died", not deaths, f"{deaths} deaths"),
        Check("all drained in good order", not any(codes.values()), f"exit codes {codes}"),
        Check("a listing still works", not unreadable, unreadable),
        Check(
            "no lane holds garbage", writer.leaves_rows or not any(residue.values()), f"{residue}"
        ),
        Check(
            "the store took the garbage",
            writer.writes > rounds / 2,
            f"{writer.writes} writes in {rounds} rounds",
        ),
        Check(
            "unreadable records are in quarantine with a reason",
            not missing and bool(met) == writer.can_spoil,
            f"{len(met) - len(missing)} of {len(met)}, missing {missing[:3]}",
        ),
    ]
    return Outcome(
        contract=stage.setup.contract,
        seed=stage.setup.seed,
        rounds=rounds,
        jobs=len(good),
        set_aside=len(met),
        checks=checks,
    )


async def _states(stage: Stage) -> tuple[dict[str, str], str]:
    """The state of every good job, and what went wrong in a listing of all."""
    ledger = open_ledger(stage.subject.url())
    states: dict[str, str] = {}
    try:
        for job_id in stage.load.acked.values():
            record = await ledger.get(job_id)
            states[job_id] = record.state if record else "gone"
        try:
            await ledger.find(Query(limit=1000))
            await ledger.counts()
        except TenureError as error:
            return states, f"{type(error).__name__}: {error}"
        return states, ""
    finally:
        await ledger.close()


async def _residue(stage: Stage) -> dict[str, int]:
    try:
        left = await stage.subject.residue()
    except TenureError as error:
        return {str(error): 1}
    return {name: count for name, count in left.items() if name not in HARMLESS}
