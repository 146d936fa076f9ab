"""Rows become jobs: in batches, with two on their way, patient with a full queue or a lost answer.

Every row has a job id of its own, so whatever is sent again finds its job there already.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import attrgetter

import msgspec

from leasehold.core.errors import StoreError
from leasehold.core.job import NewJob, Submitted
from leasehold.core.opening import open_queue
from leasehold.core.seam import Queue

_BATCH = 2_000  # a database pays by the batch; contracts on Redis cut it as they like
_IN_FLIGHT = 3
_TRIES = 6
_REASONS_MAX = 5
_OBJECTS_A_COLLECTION = 100_000
_ACCEPTED = {"created", "replayed"}
_status = attrgetter("status")


class Tally(msgspec.Struct, kw_only=True):
    """What became of the rows. `replayed` were in the queue before; the last two wrote nothing."""

    created: int = 0
    replayed: int = 0
    conflict: int = 0
    invalid: int = 0
    reasons: list[str] = []

    @property
    def refused(self) -> int:
        """Rows that are not in the queue."""
        return self.conflict + self.invalid

    def count(self, answers: Sequence[Submitted]) -> None:
        """Add some answers."""
        counts = Counter(map(_status, answers))
        for status, count in counts.items():
            setattr(self, status, getattr(self, status) + count)
        if counts.keys() - _ACCEPTED:
            refused = [answer for answer in answers if not answer.accepted]
            told = [f"{answer.job_id}: {answer.reason or answer.status}" for answer in refused]
            self.reasons = [*self.reasons, *told][:_REASONS_MAX]

    def add(self, other: Tally) -> None:
        """Add another's counts."""
        for name in ("created", "replayed", "conflict", "invalid"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons = [*self.reasons, *other.reasons][:_REASONS_MAX]


def submit_all(url: str, jobs: Iterable[NewJob], *, rate: float = 0.0) -> Tally:
    """Put all jobs into a queue, at most `rate` a second (0: as fast as it goes)."""
    with _collecting_seldom():
        return asyncio.run(_submit_all(url, jobs, rate))


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Rows and answers go when their last name does: looking for circles is a tenth of the work."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_A_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def _submit_all(url: str, jobs: Iterable[NewJob], rate: float) -> Tally:
    tally = Tally()
    queue = open_queue(url, worker_id="leasehold-pipeline")
    flying: set[asyncio.Task[list[Submitted]]] = set()
    began, sent = time.monotonic(), 0
    try:
        for batch in _batches(jobs, rate):
            sent += len(batch)
            if rate:
                await asyncio.sleep(max(0.0, began + sent / rate - time.monotonic()))
            flying.add(asyncio.create_task(_submit(queue, batch)))
            if len(flying) >= _IN_FLIGHT:
                done, flying = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    tally.count(each.result())
        for each in flying:
            tally.count(await each)
        return tally
    finally:
        for each in flying:
            each.cancel()
        await queue.close()


async def _submit(queue: Queue, jobs: list[NewJob]) -> list[Submitted]:
    """One batch to its end: a full queue is waited for, a lost answer asked for again."""
    answers: list[Submitted] = []
    tries = 0
    while jobs:
        try:
            got = await queue.submit(jobs)
        except StoreError:
            tries += 1
            if tries == _TRIES:
                raise
            await asyncio.sleep(0.2 * 2**tries)
            continue
        full = [answer for answer in got if answer.status == "full"]
        if not full:
            return answers + got
        answers += [answer for answer in got if answer.status != "full"]
        jobs = [job for job, answer in zip(jobs, got, strict=True) if answer.status == "full"]
        await asyncio.sleep(max(100, full[0].retry_after_ms) / 1000)
    return answers


def _batches(jobs: Iterable[NewJob], rate: float) -> Iterator[list[NewJob]]:
    size = max(1, min(_BATCH, int(rate / 4))) if rate else _BATCH
    rest = iter(jobs)
    while batch := list(islice(rest, size)):
        yield batch
