"""Group commit for submits: what arrives while one submit is on its way travels with the next.

Alone, a job leaves at once. Under load many requests share one round trip and one script, which is
cheaper for the gateway and for the store; each still gets the answer for its own job.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from leasehold.core.intake import Submits
from leasehold.core.job import NewJob, Submitted

_JOBS_MAX = 100
_BYTES_MAX = 1 << 20


class _Waiting(NamedTuple):
    jobs: Sequence[NewJob]
    answer: asyncio.Future[list[Submitted]]


class GatheredSubmits:
    """`submit` of the queue behind it, one call at a time."""

    def __init__(self, queue: Submits) -> None:
        self._queue = queue
        self._waiting: deque[_Waiting] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Like the queue's own: an error means that the fate of these jobs is unknown."""
        answer: asyncio.Future[list[Submitted]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(jobs, answer))
        if self._sender is None:
            self._sender = asyncio.create_task(self._send())
        return await answer

    async def _send(self) -> None:
        try:
            while self._waiting:
                await self._send_some(self._next())
        finally:
            self._sender = None

    def _next(self) -> list[_Waiting]:
        """What goes together: at least one request, bounded in number and size."""
        taken: list[_Waiting] = []
        jobs = size = 0
        while self._waiting and jobs < _JOBS_MAX and size < _BYTES_MAX:
            waiting = self._waiting.popleft()
            if waiting.answer.done():
                continue  # its client has gone, and nothing was sent for it
            taken.append(waiting)
            jobs += len(waiting.jobs)
            size += sum(len(job.payload) for job in waiting.jobs)
        return taken

    async def _send_some(self, taken: list[_Waiting]) -> None:
        if not taken:
            return
        try:
            answers = await self._queue.submit([job for each in taken for job in each.jobs])
        except Exception as error:
            for each in taken:
                if not each.answer.done():
                    each.answer.set_exception(error)
            return
        at = 0
        for each in taken:
            mine = answers[at : at + len(each.jobs)]
            at += len(each.jobs)
            if not each.answer.done():
                each.answer.set_result(mine)
