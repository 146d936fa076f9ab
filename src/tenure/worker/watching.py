"""What happened so far, by name: for tests that wait for an event instead of sleeping, and hooks.

The names: contact, ready, claimed, claim_failed, dry, started, ended, abandoned, reported,
report_failed, settled, settle_failed, extended, extend_failed, lost, upkeep, draining, releasing,
drained, stopped.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

Hook = Callable[[str, int], None]

_ACTIVITY = ("claimed", "settled", "lost")


class Watch:
    """Counts events and wakes whoever waits for one; belongs to the worker's loop.

    `activity` is a number that grows whenever jobs come or go.
    """

    __slots__ = ("_stirred", "_waiters", "activity", "counts", "hooks")

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.hooks: list[Hook] = []
        self.activity = 0
        self._stirred = asyncio.Event()
        self._waiters: list[tuple[str, int, asyncio.Future[None]]] = []

    def tell(self, name: str, count: int = 1) -> None:
        """Something happened `count` times; batches are told in one go."""
        self.counts[name] += count
        if name in _ACTIVITY:
            self.activity += count
            self._stirred.set()
        if self._waiters:
            self._wake(name)
        for hook in self.hooks:
            hook(name, count)

    async def stir(self, *, timeout_s: float) -> None:
        """Return when jobs come or go, or after a while."""
        self._stirred.clear()
        alarm = asyncio.get_running_loop().call_later(timeout_s, self._stirred.set)
        try:
            await self._stirred.wait()
        finally:
            alarm.cancel()

    async def until(self, name: str, count: int = 1, *, timeout_s: float = 10) -> None:
        """Return as soon as `name` has happened `count` times since the worker was made."""
        if self.counts[name] >= count:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((name, count, waiter))
        try:
            await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError:
            seen = dict(self.counts)
            raise TimeoutError(f"no {count} x {name!r} within {timeout_s} s; {seen=}") from None

    def _wake(self, name: str) -> None:
        seen = self.counts[name]
        for waited, count, waiter in self._waiters:
            if waited == name and seen >= count and not waiter.done():
                waiter.set_result(None)
        self._waiters = [entry for entry in self._waiters if not entry[2].done()]
