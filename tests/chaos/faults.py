"""What is done to the system, and log C of it: kill, stop, restart, lost replies, by a seeded plan.

A planned fault waits for a share of the jobs to be finished, not for a time, so that it strikes
under load on a fast machine and on a slow one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import msgspec

from tests.chaos.effects import now_ms
from tests.chaos.herd import Herd, Member
from tests.chaos.proxy import LossyProxy
from tests.chaos.subject import Subject
from tests.chaos.verdict import Fault

LOSS_WITHIN_S = 30.0
LISTENS_WITHIN_S = 60.0
BUSY_WITHIN_MS = 20_000


class Injected(msgspec.Struct, kw_only=True):
    """One fault that happened. `slots` is how many running jobs it can have cost their lease.

    `workers` are the names (with generation) of the workers it hit.
    """

    kind: str
    target: str
    begin_ms: int
    end_ms: int = 0
    slots: int = 0
    workers: tuple[str, ...] = ()

    def as_fault(self) -> Fault:
        """In the checker's words."""
        return Fault(kind=self.kind, target=self.target, begin_ms=self.begin_ms, end_ms=self.end_ms)


class Planned(msgspec.Struct, frozen=True):
    """A fault that strikes when this share of the jobs is finished."""

    at: float
    kind: str


def plan(
    rng: Random, kinds: dict[str, int], *, first: float = 0.04, last: float = 0.85
) -> list[Planned]:
    """So many of each kind, in random order, evenly spread with some jitter."""
    names = [kind for kind, count in kinds.items() for _ in range(count)]
    rng.shuffle(names)
    step = (last - first) / max(1, len(names))
    return [
        Planned(first + step * (place + rng.random()), kind) for place, kind in enumerate(names)
    ]


class Faults:
    """Injects faults and keeps log C."""

    def __init__(self, log: Path, subject: Subject, herd: Herd, rng: Random) -> None:
        self._log = log.open("ab")
        self._subject = subject
        self._herd = herd
        self._rng = rng
        self._stops: set[asyncio.Task[None]] = set()
        self.lease_ms = 0  # how long a stop has to be
        self.is_busy: Callable[[Member], bool] = lambda member: True
        self.injected: list[Injected] = []

    @property
    def by_kind(self) -> dict[str, int]:
        """How many of each kind there were."""
        return dict(Counter(fault.kind for fault in self.injected))

    async def kill_worker(self, member: Member) -> None:
        """kill -9, and a new one in its place."""
        async with self.logged("kill worker", member.worker, member.slots, [member]):
            self._herd.kill(member)
        self._herd.start(member)

    async def stop_worker(
        self, member: Member, for_ms: int, stopped: asyncio.Event | None = None
    ) -> None:
        """SIGSTOP for a while, then SIGCONT; `stopped` is set in between.

        Outside of the store: who stands still inside a SQLite file stops all its writers. That is a
        stated limit, has a test of its own, and would be no fault of one.
        """
        async with self.logged("stop worker", member.worker, member.slots, [member]) as fault:
            with self._subject.all_outside():
                self._herd.stop(member)
            fault.begin_ms = now_ms()  # it may have waited for its moment
            if stopped is not None:
                stopped.set()
            try:
                await asyncio.sleep(for_ms / 1000)
            finally:
                self._herd.go_on(member)

    async def kill_gateway(self, member: Member) -> None:
        """kill -9 while clients post, and a new one on the same port.

        Where workers go through it, it hits them all, and for as long as nobody answers there.
        """
        port = getattr(self._subject, "gateway_port", 0)
        hit, slots = (self._herd.workers(), self._herd.slots) if port else ([], 0)
        async with self.logged("kill gateway", member.worker, slots, hit):
            self._herd.kill(member)
            self._herd.start(member)
            if port:
                await _listening(port)

    async def kill_store(self, *, down_ms: int, wipe: bool = False) -> None:
        """kill -9 of the store, and back on its data (or, wiped, on none)."""
        workers = self._herd.workers()
        kind = "empty store" if wipe else "kill store"
        async with self.logged(kind, self._subject.name, self._herd.slots, workers) as fault:
            await self._subject.kill()
            fault.begin_ms = now_ms()  # it may have waited for its moment
            if wipe:
                await self._subject.wipe()
            await asyncio.sleep(down_ms / 1000)
            await self._subject.start()

    async def lose_reply(self, proxy: LossyProxy, verb: str, target: str, slots: int) -> None:
        """The next call of this verb is executed, and its caller never hears of it."""
        cost = slots if verb == "claim" else 0  # what a lost claim took is claimed once more
        async with self.logged(f"lost reply: {verb}", target, cost, []):
            proxy.drop_reply(when=lambda command: self._subject.verb(command) == verb)
            await proxy.reply_dropped(LOSS_WITHIN_S)

    def died(self, member: Member) -> None:
        """A member ended by itself; it will be started again."""
        self.note("death", member.worker, member.slots, (member.worker,))

    def note(
        self,
        kind: str,
        target: str,
        slots: int,
        workers: tuple[str, ...] = (),
        *,
        for_ms: int = 0,
    ) -> None:
        """Something happened that was not done from here, such as what a handler does."""
        now = now_ms()
        self._add(
            Injected(
                kind=kind,
                target=target,
                begin_ms=now - for_ms,
                end_ms=now,
                slots=slots,
                workers=workers,
            )
        )

    async def follow(self, planned: list[Planned], share: Callable[[], float]) -> None:
        """Carry out a plan as the share of finished jobs grows."""
        for each in planned:
            while share() < each.at:
                await asyncio.sleep(0.02)  # progress is in files that other processes write
            await self._inject(each.kind)

        if self._stops:
            await asyncio.gather(*self._stops)

    async def _inject(self, kind: str) -> None:
        rng = self._rng
        match kind:
            case "kill worker":
                await self.kill_worker(await self._somebody_busy("worker"))
            case "kill gateway":
                await self.kill_gateway(await self._somebody_busy("gateway"))
            case "kill store":
                await self.kill_store(down_ms=rng.randint(0, 600))
            case "stop worker":  # the plan goes on while it stands still
                for_ms = round(self.lease_ms * rng.uniform(1.5, 3.0))
                member = await self._somebody_busy("stubborn")
                stopped = asyncio.Event()
                stop = self.stop_worker(member, for_ms, stopped)
                self._stops.add(asyncio.create_task(stop))
                await stopped.wait()
            case _:
                raise ValueError(f"no fault {kind!r} can be planned")

    async def _somebody_busy(self, kind: str) -> Member:
        """One at work and not stopped: to hit one that only just starts proves nothing.

        Whoever is never at work is hit all the same; the report will say that it was in vain.
        """
        deadline_ms = now_ms() + BUSY_WITHIN_MS
        named = self._herd.named(kind)
        while now_ms() < deadline_ms:
            busy = [member for member in named if self.is_busy(member) and not member.stopped]
            if busy:
                return self._rng.choice(busy)
            await asyncio.sleep(0.02)  # what workers do is in files that they write
        return self._rng.choice(named)

    @asynccontextmanager
    async def logged(
        self, kind: str, target: str, slots: int, hit: list[Member]
    ) -> AsyncIterator[Injected]:
        """Whatever is done within the block is one fault."""
        fault = Injected(
            kind=kind,
            target=target,
            begin_ms=now_ms(),
            slots=slots,
            workers=tuple(member.worker for member in hit),
        )
        try:
            yield fault
        finally:
            fault.end_ms = now_ms()
            self._add(fault)

    def _add(self, fault: Injected) -> None:
        self.injected.append(fault)
        self._log.write(msgspec.json.encode(fault) + b"\n")
        self._log.flush()

    def close(self) -> None:
        """The log is on disk."""
        self._log.close()


async def _listening(port: int) -> None:
    """Until somebody takes connections on a port of this machine."""
    async with asyncio.timeout(LISTENS_WITHIN_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)  # a process that starts tells nobody
            else:
                writer.close()
                return
