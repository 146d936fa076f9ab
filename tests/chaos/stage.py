"""One run: a contract's store, a herd, a load, faults, and the judgement at the end.

Everything a run leaves is in one folder: the journal (A), what clients saw (B), the faults (C), the
effects of the handlers, what each process printed, and the report.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Self

import msgspec

from tenure.core.journal import JournalEvent
from tenure.core.registry import open_ledger
from tests.chaos import report as judging
from tests.chaos.effects import Effects
from tests.chaos.faults import Faults, Injected
from tests.chaos.herd import (
    Herd,
    Member,
    gateway_argv,
    stubborn_argv,
    worker_argv,
)
from tests.chaos.history import (
    STARVED,
    leases_of,
    read_journal,
    read_settles,
    recovery_ms,
    take_snapshot,
)
from tests.chaos.load import HttpChannel, LibraryChannel, Load
from tests.chaos.report import Check, Report
from tests.chaos.sql_subjects import SQL_SUBJECTS
from tests.chaos.subject import SUBJECTS, Fsync, Subject
from tests.chaos.topology import Topology, TopologySubject
from tests.chaos.verdict import Verdict, check, machine_of
from tests.ports import free_port

LOOK_EVERY_S = 0.05
AHEAD_MAX = 400


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The size of a run and its seed. `planted` breaks the herd's scripts on purpose.

    With a `topology` the store is a cluster or a Sentinel set, and submits wait for `replicas`.
    """

    folder: Path
    contract: str = "streams"
    seed: int = 1
    jobs: int = 200
    workers: int = 3
    concurrency: int = 8
    lease_ms: int = 1_500
    fsync: Fsync = "everysec"
    patience_s: float = 60.0
    planted: str = ""
    repeat: str = ""
    topology: Topology = ""
    replicas: int = 1

    @property
    def store(self) -> str:
        """What the jobs are kept in, for the report."""
        if self.topology:
            return f"{self.topology} without a file, replicas={self.replicas}"
        return f"append-only file, fsync {self.fsync}"

    def subject(self, **options: int) -> Subject:
        """The contract on its store, not started."""
        options = {"lease_ms": self.lease_ms, "lost_max": 50, **options}
        if self.topology:
            return TopologySubject(
                self.contract,
                self.folder,
                topology=self.topology,
                replicas=self.replicas,
                **options,
            )
        known = {**SUBJECTS, **SQL_SUBJECTS}
        return known[self.contract](self.folder, fsync=self.fsync, **options)

    @property
    def broken(self) -> tuple[str, ...]:
        """Contract and planted fault, for the command lines of the herd."""
        return (self.contract, self.planted) if self.planted else ()


class Stage:
    """The parts of one run, put up and taken down together."""

    def __init__(self, setup: Setup, **options: int) -> None:
        self.setup = setup
        self.folder = setup.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.subject = setup.subject(**options)
        self.herd = Herd(self.folder)
        self.effects = Effects(self.folder)
        self.load = self.new_load()
        self.faults = Faults(
            self.folder / "faults.jsonl", self.subject, self.herd, self.rng("faults")
        )
        self.faults.lease_ms = setup.lease_ms
        self.faults.is_busy = self.is_busy
        self.herd.on_death = self.faults.died
        self.began = time.monotonic()
        self._watching: asyncio.Task[None] | None = None
        self._patient = True

    def rng(self, purpose: str) -> Random:
        """Chance that the seed decides, independent for each purpose."""
        return Random(f"{self.setup.seed}:{purpose}")

    async def __aenter__(self) -> Self:
        await self.subject.start()
        await self.subject.warm()
        await self.herd.__aenter__()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self.herd.end()
        self.load.close()
        self.faults.close()
        await self.subject.stop()

    # --- the herd ----------------------------------------------------------------------------

    def add_workers(self, count: int | None = None, *, url: str = "") -> list[Member]:
        """Real workers, started."""
        setup = self.setup
        argv = worker_argv(
            url or self._worker_url(), concurrency=setup.concurrency, planted=setup.broken
        )
        first = len(self.herd.workers()) + 1
        return [
            self.herd.add(f"worker{first + n}", argv, slots=setup.concurrency)
            for n in range(setup.workers if count is None else count)
        ]

    def add_stubborn(self, count: int, *, slots: int, work_ms: int) -> list[Member]:
        """Holders that know no deadline."""
        argv = stubborn_argv(
            self._worker_url(), slots=slots, work_ms=work_ms, planted=self.setup.broken
        )
        return [self.herd.add(f"stubborn{n + 1}", argv, slots=slots) for n in range(count)]

    def _patience_ms(self) -> int:
        """A lease, and where workers go through a gateway the time it takes to come back."""
        return self.setup.lease_ms + int(getattr(self.subject, "gateway_returns_ms", 0))

    def _worker_url(self) -> str:
        """Where workers find the queue: at the store, or behind the gateway."""
        behind = getattr(self.subject, "worker_url", None)
        return str(behind()) if behind is not None else self.subject.url()

    def add_gateway(self) -> int:
        """A real gateway; returns its port."""
        port = getattr(self.subject, "gateway_port", 0) or free_port()
        self.herd.add("gateway1", gateway_argv(self.subject.url(), port))
        return port

    # --- the load ----------------------------------------------------------------------------

    def new_load(self) -> Load:
        """A load with an empty memory, for a store with an empty one."""
        return Load(self.folder / "clients.jsonl", self.rng("load"))

    def library(self, store_url: str = "") -> LibraryChannel:
        """Submits through the library."""
        return LibraryChannel(self.subject.url(store_url))

    def http(self, port: int) -> HttpChannel:
        """Submits through the gateway."""
        return HttpChannel(port, self.subject.jobs_path)

    def is_ahead(self) -> bool:
        """Whether clients should wait: so that there are some until the end, but not too many."""
        return len(self.load.acked) - len(self.effects.finished) > AHEAD_MAX

    def is_busy(self, member: Member) -> bool:
        """A worker has jobs in hand; a gateway has taken one since it was started."""
        if member.slots:
            return bool(self.effects.open_of(member.worker))
        return max(self.load.http_ok_ms, default=0) > member.started_ms

    def was_posting(self, fault: Injected) -> bool:
        """Whether this is the death of a gateway to which clients had more to say."""
        return fault.kind == "kill gateway" and any(
            ms > fault.begin_ms for ms in self.load.http_ok_ms
        )

    async def _watch(self) -> None:
        """Take in what the herd's handlers do, all the time, and note when the machine starved.

        Time in which this process neither slept as it wanted nor used the processor is time that it
        was not given, and its neighbours were not either.
        """
        while True:
            self.effects.refresh()
            wall_s, cpu_s = time.monotonic(), time.process_time()
            await asyncio.sleep(LOOK_EVERY_S)
            used_s = LOOK_EVERY_S + time.process_time() - cpu_s
            starved_ms = round((time.monotonic() - wall_s - used_s) * 1000)
            if starved_ms > self.setup.lease_ms // 4:
                self.faults.note(STARVED, "all", self.herd.slots, for_ms=starved_ms)

    async def until(self, holds: Callable[[], bool], what: str, within_s: float = 0.0) -> None:
        """Wait for something that other processes do; an error says what did not happen."""
        deadline = time.monotonic() + (within_s or self.setup.patience_s)
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {within_s or self.setup.patience_s} s")
            await asyncio.sleep(LOOK_EVERY_S)

    async def quiesce(self) -> bool:
        """Wait until every acknowledged job has ended; False when patience did, now or before."""
        final = machine_of(self.setup.contract).final
        deadline = time.monotonic() + self.setup.patience_s
        ledger = open_ledger(self.subject.url())
        try:
            while self._patient:
                states = (await ledger.counts()).states
                ended = sum(states.get(state, 0) for state in final)
                if ended >= len(self.load.acked) and sum(states.values()) == ended:
                    return True
                self._patient = time.monotonic() < deadline
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await ledger.close()
        return False

    # --- the judgement -----------------------------------------------------------------------

    async def judge(
        self,
        scenario: str,
        *,
        expected: Mapping[str, int],
        planned: Mapping[str, int],
        deaths: range = range(1),
        more: Sequence[Check] = (),
    ) -> Report:
        """Wait for quiet, end the herd in good order, read everything, decide."""
        setup = self.setup
        quiet = await self.quiesce()
        codes = await self.herd.end(kindly=True)
        url = self.subject.url()
        events = await read_journal(url)
        snapshot = await take_snapshot(url, self.rng("snapshot"))
        self.effects.refresh()
        injected = self.faults.injected
        verdict = check(
            events,
            observations=[*self.load.observations, *read_settles(self.folder)],
            faults=[fault.as_fault() for fault in injected],
            snapshot=snapshot,
            machine=machine_of(self.setup.contract),
        )
        recovery = recovery_ms(events, injected, self.load.http_ok_ms)
        died = self.faults.by_kind.get("death", 0)
        unclean = {n: code for n, code in codes.items() if code and not n.startswith("stubborn")}
        checks = [
            Check("everything ended in time", quiet, f"patience {self.setup.patience_s:.0f} s"),
            *judging.check_submits(self.load, events),
            judging.check_ends(self.setup.contract, events, expected),
            *self._check_starts(verdict, events),
            judging.check_effects(events, self.effects),
            judging.check_residue(await self.subject.residue()),
            judging.check_faults(injected, planned, events),
            *self._check_recovery(recovery, planned, events),
            Check("no process died by itself but by plan", died in deaths, f"{died} deaths"),
            Check("the herd drained in good order", not unclean, f"exit codes {codes}"),
            *more,
        ]
        made = Report(
            scenario=scenario,
            contract=self.setup.contract,
            seed=self.setup.seed,
            repeat=self.setup.repeat or self._repeat(scenario),
            jobs=len(self.load.wanted),
            seconds=round(time.monotonic() - self.began, 1),
            lease_ms=self.setup.lease_ms,
            store=setup.store,
            faults=self.faults.by_kind,
            counts={
                "events": verdict.events,
                "claims": verdict.starts,
                "handler starts": len(self.effects.starts),
                "stale writes refused": verdict.rejects,
                "answers lost": self.load.phases["info"],
            },
            invariants=judging.invariants_of(verdict),
            checks=checks,
            recovery_ms=judging.recovery_table(recovery),
            journal_sha256=judging.journal_hash(events),
            verdict_text=str(verdict),
        )
        self._keep(made, events)
        return made

    def _check_starts(self, verdict: Verdict, events: Sequence[JournalEvent]) -> list[Check]:
        """A replica that is promoted may not know of claims and ends, so those are not counted."""
        leases, injected = leases_of(events), self.faults.injected
        if self.setup.topology:
            return judging.check_starts_again(self.effects, injected, leases)
        return judging.check_starts(verdict, self.effects, injected, leases)

    def _check_recovery(
        self,
        recovery: Mapping[str, list[int]],
        planned: Mapping[str, int],
        events: Sequence[JournalEvent],
    ) -> list[Check]:
        if not self.setup.topology:
            return [judging.check_recovery(recovery, self._patience_ms(), planned)]
        injected = self.faults.injected
        return [
            judging.check_replaced(recovery, injected),
            judging.check_lagged(self.effects, leases_of(events), injected),
        ]

    def _repeat(self, scenario: str) -> str:
        setup = self.setup
        words = ["python", "-m", "tests.chaos", scenario, "--contract", setup.contract]
        words += ["--seed", str(setup.seed), "--jobs", str(setup.jobs)]
        words += ["--workers", str(setup.workers), "--concurrency", str(setup.concurrency)]
        words += ["--lease-ms", str(setup.lease_ms), "--fsync", setup.fsync]
        if setup.topology:
            words += ["--topology", setup.topology, "--replicas", str(setup.replicas)]
        if setup.planted:
            words += ["--planted", setup.planted]
        return shlex.join(words)

    def _keep(self, made: Report, events: Sequence[msgspec.Struct]) -> None:
        with (self.folder / "journal.jsonl").open("wb") as file:
            for event in events:
                file.write(msgspec.json.encode(event) + b"\n")
        (self.folder / "report.json").write_bytes(made.as_json())
        (self.folder / "report.txt").write_text(f"{made}\n")
