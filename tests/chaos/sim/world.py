"""One simulated run: a seed makes nodes, work and faults; then all is healed and judged.

The workers are the real runtime over the memory contract. A worker node may be killed, stopped for
longer than a lease, or drained; requests and answers may be lost or come late; the store may be out
of reach for a while; an operator pauses the queue and cancels jobs. When the storm is over the
network is calm and somebody serves: then every job must end, and the history must be sound.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import TypeVar

import msgspec
import structlog

from tenure.contracts.memory import SharedStore
from tenure.contracts.memory.machine import MACHINE as MEMORY
from tenure.contracts.memory.store import MemoryOptions, MemoryStore
from tenure.core.journal import JournalEvent
from tenure.worker import Worker
from tests.chaos.sim.loop import Node, SimLoop, Stuck
from tests.chaos.sim.network import CALM, Network, Weather
from tests.chaos.sim.nodes import LEASE_MS, SETTINGS, Observed, make_task, new_job, submit_all
from tests.chaos.sim.planted import SOUND, Rules
from tests.chaos.verdict import Fault, Observation, Snapshot, Verdict, check

T = TypeVar("T")

EPOCH_MS = 1_700_000_000_000
STORM_S = 12.0
HEAL_S_MAX = 60.0
WORKERS = 3
SUBMITTERS = 2
JOBS_PER_SUBMITTER = 10


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one seed."""

    seed: int
    verdict: Verdict
    trace: str
    errors: list[str]
    virtual_s: float
    steps: int
    kills: int
    pauses: int
    messages_lost: int

    @property
    def ok(self) -> bool:
        return self.verdict.ok and not self.errors


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The three logs of one run, and the store at its end."""

    events: list[JournalEvent]
    observations: list[Observation]
    faults: list[Fault]
    snapshot: Snapshot


class World:
    """Everything of one run. Each kind of chance has its own stream, all from one seed."""

    def __init__(self, seed: int, rules: Rules) -> None:
        self.seed = seed
        self.rules = rules
        self.loop = SimLoop(self._chance("order"))
        options = MemoryOptions(lease_ms=LEASE_MS, max_attempts=3)
        store = rules.store("sim", options, now_ms=self.now_ms, random=self._chance("tokens"))
        self.shared = SharedStore(store)
        self.network = Network(self.loop, self.shared, self._chance("network"))
        self.rng = self._chance("nemesis")
        self.observations: list[Observation] = []
        self.faults: list[Fault] = []
        self.errors: list[str] = []
        self.workers: dict[Node, Worker] = {}
        self.submitters: dict[Node, asyncio.Task[None]] = {}
        self._names = 0

    def now_ms(self) -> int:
        return EPOCH_MS + int(self.loop.time() * 1000)

    def _chance(self, purpose: str) -> Random:
        return Random(f"{self.seed}/{purpose}")  # a string: the same in every process

    def _queue(self, name: str) -> Observed:
        queue = self.rules.queue(
            self.shared, worker_id=name, instance=f"{name}-i", wire=self.network
        )
        return Observed(queue, name, self.now_ms, self.observations)

    # --- nodes -------------------------------------------------------------------------------

    def start_worker(self) -> None:
        if self.network.closed:
            return  # it was to come after the end
        self._names += 1
        name = f"worker-{self._names}"
        node, rng = Node(name), self._chance(name)

        async def life() -> None:
            await worker.serve()
            del self.workers[node]

        worker = Worker(
            [make_task(rng)],
            queues=[lambda: self._queue(name)],
            settings=replace(SETTINGS, worker_id=name),
            rng=rng,
        )
        self.workers[node] = worker
        self._watch(self.loop.spawn(node, life()), name)

    def start_submitter(self, number: int) -> None:
        name = f"submitter-{number}"
        node, rng = Node(name), self._chance(name)
        jobs = [new_job(f"j{number}-{n:02d}", rng) for n in range(JOBS_PER_SUBMITTER)]
        life = submit_all(self._queue(name), jobs, rng, STORM_S * 0.7)
        self.submitters[node] = self.loop.spawn(node, life)
        self._watch(self.submitters[node], name)
        if rng.random() < 0.3:
            self.loop.call_later(rng.random() * STORM_S, self._kill, node)

    def _watch(self, task: asyncio.Task[None], name: str) -> None:
        def ended(done: asyncio.Task[None]) -> None:
            if not done.cancelled() and done.exception() is not None:
                self.errors.append(f"{name} died of {done.exception()!r}")

        task.add_done_callback(ended)

    # --- the storm ---------------------------------------------------------------------------

    async def run(self) -> None:
        for _ in range(WORKERS):
            self.start_worker()
        for number in range(SUBMITTERS):
            self.start_submitter(number)
        await self._storm()
        await self._heal()

    async def _storm(self) -> None:
        rng = self.rng
        self.network.weather = Weather(
            request_lost=rng.random() * 0.1,
            answer_lost=rng.random() * 0.15,
            late=rng.random() * 0.1,
        )
        acts: tuple[Callable[[], None], ...] = (
            *(self._kill_worker, self._kill_worker, self._pause_worker, self._pause_worker),
            *(self._drain_worker, self._cut_off, self._pause_queue, self._cancel_job),
        )
        while self.loop.time() < STORM_S:
            await asyncio.sleep(0.1 + rng.random() * 1.2)
            rng.choice(acts)()

    def _some_worker(self) -> Node | None:
        able = [node for node in self.workers if node.alive and not node.paused]
        return self.rng.choice(able) if able else None

    def _note(self, kind: str, target: str, length_s: float = 0) -> None:
        begin_ms = self.now_ms()
        end_ms = begin_ms + int(length_s * 1000)
        self.faults.append(Fault(kind=kind, target=target, begin_ms=begin_ms, end_ms=end_ms))

    def _kill(self, node: Node) -> None:
        if node.alive:
            self._note("kill", node.name)
            self.loop.kill(node)
            self.workers.pop(node, None)

    def _kill_worker(self) -> None:
        node = self._some_worker()
        if node is not None:
            self._kill(node)
            self.loop.call_later(self.rng.random() * 2, self.start_worker)

    def _pause_worker(self) -> None:
        node = self._some_worker()
        if node is not None:
            length_s = LEASE_MS / 1000 * (1.5 + self.rng.random() * 1.5)
            self._note("pause", node.name, length_s)
            self.loop.pause(node)
            self.loop.call_later(length_s, self.loop.resume, node)

    def _drain_worker(self) -> None:
        node = self._some_worker()
        if node is not None and self.workers[node].state == "serving":
            self.workers[node].stop(at_once=self.rng.random() < 0.3)
            self.loop.call_later(self.rng.random() * 2, self.start_worker)

    def _cut_off(self) -> None:
        if not self.network.cut:
            length_s = self.rng.random() * 2 * LEASE_MS / 1000
            self._note("partition", "store", length_s)
            self.network.cut = True
            self.loop.call_later(length_s, setattr, self.network, "cut", False)

    def _pause_queue(self) -> None:
        if not self.shared.store.paused:
            self._steer(lambda store: store.pause(True))
            length_s = self.rng.random()
            resume = partial(self._steer, lambda store: store.pause(False))
            self.loop.call_later(length_s, resume)

    def _cancel_job(self) -> None:
        jobs = list(self.shared.store.jobs)
        if jobs:
            job_id = self.rng.choice(jobs)
            self._steer(lambda store: store.cancel(job_id))

    def _steer(self, step: Callable[[MemoryStore], object]) -> None:
        self.shared.run(step)

    # --- the calm ----------------------------------------------------------------------------

    async def _heal(self) -> None:
        self.network.weather = CALM
        deadline_s = self.loop.time() + HEAL_S_MAX
        while self.loop.time() < deadline_s:
            await asyncio.sleep(1.0)  # virtual: costs nothing
            if not any(node.alive for node in self.workers):
                self.start_worker()
            if self._all_ended():
                await asyncio.sleep(3 * LEASE_MS / 1000)  # whatever was late has arrived by now
                if self._all_ended():  # a submit of a dead submitter may have been late, too
                    return

    def _all_ended(self) -> bool:
        jobs = self.shared.store.jobs.values()
        return all(job.state in MEMORY.final for job in jobs) and all(
            each.done() or not node.alive for node, each in self.submitters.items()
        )

    def recorded(self) -> Recording:
        store = self.shared.store
        records = [store.record(job) for job in store.jobs.values()]
        by_job = {job_id: tuple(job.events) for job_id, job in store.jobs.items()}
        return Recording(
            events=store.read_journal("", store.journal_length),
            observations=self.observations,
            faults=self.faults,
            snapshot=Snapshot(records=records, events=by_job, counts=store.counts()),
        )

    def judged(self) -> Verdict:
        made = self.recorded()
        return check(
            made.events,
            observations=made.observations,
            faults=made.faults,
            snapshot=made.snapshot,
        )

    def trace(self) -> str:
        """A hash of all that happened: equal for equal seeds, whatever the process."""
        digest = hashlib.sha256()
        store = self.shared.store
        digest.update(msgspec.json.encode(store.read_journal("", store.journal_length)))
        digest.update(msgspec.json.encode(self.observations))
        digest.update(msgspec.json.encode([self.faults, self.loop.steps, self.loop.time()]))
        return digest.hexdigest()


def simulate(seed: int, rules: Rules = SOUND) -> Run:
    """Run one seed to its end, and judge it."""
    return _play(seed, rules, _outcome)


def record(seed: int) -> Recording:
    """Run one seed to its end, and keep what was logged."""
    return _play(seed, SOUND, World.recorded)


def _play(seed: int, rules: Rules, answer: Callable[[World], T]) -> T:
    with _silence():
        world = World(seed, rules)
        try:
            world.loop.run_until_complete(world.run())
        except Stuck as stuck:
            world.errors.append(repr(stuck))
        try:
            return answer(world)
        finally:
            world.network.closed = True
            world.loop.bury()
            world.loop.close()


def _outcome(world: World) -> Run:
    faults = [fault.kind for fault in world.faults]
    return Run(
        seed=world.seed,
        verdict=world.judged(),
        trace=world.trace(),
        errors=world.errors + [repr(error) for error in world.network.errors],
        virtual_s=world.loop.time(),
        steps=world.loop.steps,
        kills=faults.count("kill"),
        pauses=faults.count("pause"),
        messages_lost=world.network.lost,
    )


@contextmanager
def _silence() -> Iterator[None]:
    """Workers that are killed and cut off a thousand times would fill any log."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
