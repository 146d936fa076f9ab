"""How a worker stops.

first SIGTERM or SIGINT   no more claims; handlers may finish for `drain_ms`; then they are
                          cancelled and their leases handed back
second one                everything is handed back at once
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import structlog

from tenure.worker.config import Settings
from tenure.worker.execute import Executor
from tenure.worker.serving import Service
from tenure.worker.slots import Slots
from tenure.worker.watching import Watch

log = structlog.get_logger("tenure.worker")

# Some supervisors signal a whole process group and then its leader again: one press, not two.
_SAME_PRESS_S = 0.1


class Stopping:
    """How far the request to stop has gone: not at all, drain, or release at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.release = asyncio.Event()
        self._pressed: float | None = None

    def press(self) -> None:
        """A signal arrived: the first drains, a later one releases."""
        now = asyncio.get_running_loop().time()
        if self._pressed is not None and now - self._pressed < _SAME_PRESS_S:
            return
        self._pressed = now
        self.ask(at_once=self.drain.is_set())

    def ask(self, *, at_once: bool = False) -> None:
        """Stop; with `at_once` without waiting for handlers."""
        self.drain.set()
        if at_once:
            self.release.set()


@contextmanager
def signals(press: Callable[[], None]) -> Generator[None]:
    """Route SIGTERM and SIGINT to `press` for a while."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, press)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def first_of(*events: asyncio.Event, timeout_s: float | None = None) -> bool:
    """Wait until one of the events is set; False when the time is over before."""
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(
            waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)
    finally:
        for waiter in waiters:
            waiter.cancel()


class Drain:
    """One worker's way from serving to quiet."""

    def __init__(
        self,
        executor: Executor,
        services: Sequence[Service],
        slots: Slots,
        settings: Settings,
        watch: Watch,
    ) -> None:
        self._executor = executor
        self._services = services
        self._slots = slots
        self._settings = settings
        self._watch = watch

    async def run(self, claimers: Sequence[asyncio.Task[None]], stopping: Stopping) -> bool:
        """True when nothing was cut short and every outcome found its way to the store."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.drain_ms / 1000
        self._watch.tell("draining")
        await self._end_claims(claimers, stopping)
        quiet = self._executor.quiet()
        left_s = max(0.0, deadline - loop.time())
        await first_of(quiet, stopping.release, timeout_s=left_s)
        if not quiet.is_set():
            await self._release(quiet, stopping)
        flushed = await self._flush()
        self._watch.tell("drained")
        return flushed and not stopping.release.is_set()

    async def _end_claims(self, claimers: Sequence[asyncio.Task[None]], stopping: Stopping) -> None:
        """A claim under way may still bring leases; those are handed back by its claimer."""
        for service, claimer in zip(self._services, claimers, strict=True):
            service.claimer.stopping = True
            if not service.claimer.in_claim:
                claimer.cancel()
        self._slots.close()
        self._executor.end_unbegun()
        patience_s = self._settings.claim_wait_ms / 1000 + 1
        done = asyncio.Event()
        gathered = asyncio.gather(*claimers, return_exceptions=True)
        gathered.add_done_callback(lambda _: done.set())
        await first_of(done, stopping.release, timeout_s=patience_s)
        for claimer in claimers:
            claimer.cancel()

    async def _release(self, quiet: asyncio.Event, stopping: Stopping) -> None:
        """Cancel what still runs and hand its leases back; at once after a second signal."""
        self._watch.tell("releasing")
        attempts = list(self._executor.running.values())
        log.warning("handing back unfinished jobs", jobs=len(attempts))
        for attempt in attempts:
            self._executor.end(attempt, "shutdown")
        grace_s = self._settings.cancel_grace_ms / 1000 + 1
        await first_of(quiet, stopping.release, timeout_s=grace_s)
        for attempt in attempts:
            self._executor.conclude(attempt)

    async def _flush(self) -> bool:
        """Give the last outcomes a chance to be answered."""
        emptied = [
            flusher.empty()
            for service in self._services
            for flusher in (service.source.reports, service.source.settles)
        ]
        try:
            limit_s = self._settings.flush_ms / 1000
            flushed = all(await asyncio.wait_for(asyncio.gather(*emptied), limit_s))
        except TimeoutError:
            flushed = False
        if not flushed:
            left = sum(service.source.settles.backlog for service in self._services)
            log.error("stopping with outcomes the store did not take", outcomes=left)
        return flushed
