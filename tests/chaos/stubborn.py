"""A holder that does not look at the clock: `python -m tests.chaos.stubborn URL SLOTS WORK_MS`.

The real worker drops what it can no longer write by itself, so after a pause hardly a late write
of it reaches the store. This one uses the seam alone, knows no deadline, and sends its report and
its outcome whatever happened meanwhile: only the fence in the store stands between it and harm.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from tenure.core.encoding import short_hash
from tenure.core.errors import LeaseLost, StoreError
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome
from tenure.core.registry import open_queue
from tenure.core.seam import Queue
from tests.chaos.effects import append, note_effect, now_ms
from tests.chaos.verdict import Observation

CLAIM_WAIT_MS = 300
T = TypeVar("T")


class Stubborn:
    """Claims up to `slots` jobs, works `work_ms` on each, writes."""

    def __init__(self, queue: Queue, *, slots: int, work_ms: int) -> None:
        self._queue = queue
        self._work_s = work_ms / 1000
        self._free = slots
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until killed."""
        while True:
            if not self._free:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                continue
            claim = partial(self._queue.claim, self._free, wait_ms=CLAIM_WAIT_MS)
            leases = await _until_answered(claim)
            for lease in leases:
                self._free -= 1
                running = asyncio.create_task(self._hold(lease))
                self._running.add(running)
                running.add_done_callback(self._over)

    def _over(self, running: asyncio.Task[None]) -> None:
        self._running.discard(running)
        self._free += 1
        running.result()

    async def _hold(self, lease: Lease) -> None:
        note_effect("start", lease)
        await asyncio.sleep(self._work_s)
        note_effect("end", lease)
        news = Report(lease=lease, step="stubborn", data=b'{"late":"perhaps"}')
        await _until_answered(lambda: self._queue.report([news]))
        await self._settle(Outcome(lease, "complete", result=b'{"by":"stubborn"}'))

    async def _settle(self, outcome: Outcome) -> None:
        begin_ms = now_ms()
        verdict = (await _until_answered(lambda: self._queue.settle([outcome])))[0]
        append(
            "settles",
            Observation(
                op="settle",
                result="ok",
                begin_ms=begin_ms,
                end_ms=now_ms(),
                job_id=outcome.lease.job_id,
                fence=outcome.lease.fence,
                kind=outcome.kind,
                answer="LeaseLost" if isinstance(verdict, LeaseLost) else type(verdict).__name__,
                result_h=short_hash(outcome.result),
            ),
        )


async def _until_answered(call: Callable[[], Awaitable[T]]) -> T:
    """Send the same again until there is an answer, as the seam allows for every call."""
    while True:
        try:
            return await call()
        except StoreError:
            await asyncio.sleep(0.05)  # the store is away; nothing tells when it is back


async def _main(url: str, slots: int, work_ms: int) -> None:
    name = f"{os.environ['POD_NAME']}-stubborn"
    await Stubborn(open_queue(url, worker_id=name), slots=slots, work_ms=work_ms).run()


def main(argv: list[str]) -> None:
    """Run with URL, SLOTS and WORK_MS."""
    url, slots, work_ms = argv
    asyncio.run(_main(url, int(slots), int(work_ms)))


if __name__ == "__main__":
    main(sys.argv[1:])
