"""The two ways to reach jobs: through their store (`StoreSide`) or over a gateway's HTTP.

Both answer the same questions, so that `submit` and `watch` need not know which one they use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from tenure.cli.exits import Exit, Failed
from tenure.cli.views import is_final, job_object
from tenure.core.errors import NotFound, ReplyLost, StoreUnreachable
from tenure.core.job import JobEvent, NewJob, Submitted
from tenure.core.registry import open_ledger, open_queue
from tenure.core.seam import Counts

# A store has no call to wait for one job's next event; ask often at first, then less.
_POLL_S_MIN, _POLL_S_MAX = 0.01, 0.25
# Whoever waits for a job outlasts a restart of its store.
_AWAY_S_MAX = 30.0


class Side(Protocol):
    """What `submit` and `watch` ask."""

    async def submit(self, job: NewJob) -> Submitted:
        """Store the job, or say why not."""

    def follow(self, job_id: str) -> AsyncIterator[JobEvent]:
        """The job's events from the first one on; ends after the one that ended the job."""

    async def job(self, job_id: str) -> dict[str, Any]:
        """The job as an object; raises `NotFound`."""

    async def close(self) -> None:
        """Let go of connections."""


class StoreSide:
    """Speaks to the store itself."""

    def __init__(self, url: str) -> None:
        self._queue = open_queue(url, worker_id="tenure-cli")
        self._ledger = open_ledger(url)
        self._answered_at = float("-inf")

    async def submit(self, job: NewJob) -> Submitted:
        submitted = (await self._queue.submit([job]))[0]
        self._answered_at = time.monotonic()
        return submitted

    async def follow(self, job_id: str) -> AsyncIterator[JobEvent]:
        after, pause_s = "", _POLL_S_MIN
        while True:
            try:
                # The order matters: a job that was final before its events were read has no more.
                job = await self.job(job_id)
                ended = is_final(job["state"], job["contract"])
                events = await self._ledger.events(job_id, after=after)
            except (StoreUnreachable, ReplyLost):
                if time.monotonic() - self._answered_at > _AWAY_S_MAX:
                    raise
                await asyncio.sleep(_POLL_S_MAX)
                continue
            self._answered_at = time.monotonic()
            for event in events:
                yield event
                after = event.event_id
            if ended and not events:
                return
            pause_s = _POLL_S_MIN if events else min(pause_s * 1.5, _POLL_S_MAX)
            if not ended:
                await asyncio.sleep(pause_s)

    async def job(self, job_id: str) -> dict[str, Any]:
        record = await self._ledger.get(job_id)
        if record is None:
            raise NotFound(
                f"there is no job {job_id} (any more); `tenure ls` lists those there are"
            )
        return job_object(record)

    async def counts(self) -> Counts:
        """Depths and totals; also the quickest way to learn whether the store answers."""
        return await self._ledger.counts()

    async def close(self) -> None:
        await self._queue.close()
        await self._ledger.close()


def open_side(queue_url: str, gateway_url: str, api_key: str) -> Side:
    """The gateway if one is named, else the store."""
    if not gateway_url:
        return StoreSide(queue_url)
    from tenure.cli.gateway_side import GatewaySide

    return GatewaySide(gateway_url, api_key)


async def wait_for_end(
    side: Side, job_id: str, timeout_s: float | None, show: Any
) -> dict[str, Any]:
    """Follow a job to its end, showing each event; the finished job, or exit code 7."""
    try:
        async with asyncio.timeout(timeout_s):
            async for event in side.follow(job_id):
                show(event)
            return await side.job(job_id)
    except TimeoutError:
        raise Failed(
            Exit.TIMEOUT,
            f"job {job_id} had not ended after {timeout_s:g} s; `tenure watch {job_id}` goes on",
            job_id=job_id,
        ) from None
