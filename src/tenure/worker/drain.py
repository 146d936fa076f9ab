"""How a worker stops.

first SIGTERM or SIGINT   no more claims; handlers may finish for `drain_ms`; then they are
                          cancelled and their leases handed back
second one                everything is handed back at once
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import structlog

from tenure.worker.attempt import Executor
from tenure.worker.claim import Claimer
from tenure.worker.source import Context, Source

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


async def _first_of(*events: asyncio.Event, timeout_s: float | None = None) -> bool:
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


async def drain(
    claimers: Mapping[Claimer, asyncio.Task[None]],
    executor: Executor,
    context: Context,
    stopping: Stopping,
) -> bool:
    """True when nothing was cut short and the store took every outcome."""
    settings, watch = context.settings, context.watch
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settings.drain_ms / 1000
    watch.tell("draining")
    for claimer, running in claimers.items():
        claimer.stopping = True
        if not claimer.in_claim:
            running.cancel()
    context.slots.close()
    executor.end_unbegun()
    await _end_claims(list(claimers.values()), stopping, settings.claim_wait_ms)
    quiet = executor.quiet()
    left_s = max(0.0, deadline - loop.time())
    await _first_of(quiet, stopping.release, timeout_s=left_s)
    if not quiet.is_set():
        watch.tell("releasing")
        await _release(executor, quiet, stopping, settings.cancel_grace_ms)
    flushed = await _flush([claimer.source for claimer in claimers], settings.flush_ms)
    watch.tell("drained")
    return flushed and not stopping.release.is_set()


async def _end_claims(
    running: Sequence[asyncio.Task[None]], stopping: Stopping, wait_ms: int
) -> None:
    """A claim under way may still bring leases; those are handed back by its claimer."""
    done = asyncio.Event()
    gathered = asyncio.gather(*running, return_exceptions=True)
    gathered.add_done_callback(lambda _: done.set())
    await _first_of(done, stopping.release, timeout_s=wait_ms / 1000 + 1)
    for each in running:
        each.cancel()


async def _release(
    executor: Executor, quiet: asyncio.Event, stopping: Stopping, grace_ms: int
) -> None:
    """Cancel what still runs and hand its leases back; at once after a second signal."""
    attempts = list(executor.running)
    log.warning("handing back unfinished jobs", jobs=len(attempts))
    for attempt in attempts:
        executor.end(attempt, "shutdown")
    await _first_of(quiet, stopping.release, timeout_s=grace_ms / 1000 + 1)
    for attempt in attempts:
        executor.conclude(attempt)


async def _flush(sources: Sequence[Source], limit_ms: int) -> bool:
    """Give the last outcomes a chance to be answered."""
    emptied = [
        flusher.empty() for source in sources for flusher in (source.reports, source.settles)
    ]
    try:
        flushed = all(await asyncio.wait_for(asyncio.gather(*emptied), limit_ms / 1000))
    except TimeoutError:
        flushed = False
    if not flushed:
        left = sum(source.settles.backlog for source in sources)
        log.error("stopping with outcomes the store did not take", outcomes=left)
    return flushed
