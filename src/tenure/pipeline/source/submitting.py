"""Submits rows as jobs: in batches, several at once; waits for a full queue, repeats lost answers.

Every row has its own job id, so a row that is sent again finds its job already stored.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow as pa

from tenure.core.errors import StoreError
from tenure.core.job import NewJob, Submitted
from tenure.core.registry import has_part, open_queue, parse_url
from tenure.core.seam import Queue

if TYPE_CHECKING:
    from tenure.pipeline.source.copying import BoxColumns

CONTROL = ("priority", "delay_ms", "gid", "max_attempts")
Jobs = TypeVar("Jobs", list[NewJob], pa.RecordBatch)

_BATCH = 2_000  # a database has costs per batch; contracts on Redis split it themselves
_PART = 5_000
_PART_BYTES = 16_000_000
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
            refusals = [answer.reason for answer in answers if not answer.accepted]
            self.reasons = [*self.reasons, *refusals][:_REASONS_MAX]

    def add(self, other: Tally) -> None:
        """Add another's counts."""
        for name in ("created", "replayed", "conflict", "invalid"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons = [*self.reasons, *other.reasons][:_REASONS_MAX]


def submit_all(url: str, jobs: Iterable[NewJob], *, rate: float = 0.0) -> Tally:
    """Put all jobs into a queue, at most `rate` a second (0: as fast as it goes)."""
    with _collecting_seldom():
        return asyncio.run(_submit_all(url, jobs, rate))


def submit_columns(url: str, batches: Iterable[pa.RecordBatch], *, rate: float = 0.0) -> Tally:
    """The same of columns: `job_id`, `task`, `payload` (JSON), and of `CONTROL` those there are."""
    with _collecting_seldom():
        return asyncio.run(_submit_columns(url, batches, rate))


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Garbage collection would cost a tenth of the time, and rows and answers form no cycles."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_A_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def _submit_all(url: str, jobs: Iterable[NewJob], rate: float) -> Tally:
    queue = open_queue(url, worker_id="tenure-pipeline")

    async def send(batch: list[NewJob]) -> Tally:
        return _counted(await _submit(queue, batch), Tally())

    try:
        return await _send_all(_batches(jobs, _size(_BATCH, rate)), send, rate)
    finally:
        await queue.close()


async def _submit_columns(url: str, batches: Iterable[pa.RecordBatch], rate: float) -> Tally:
    queue = open_queue(url, worker_id="tenure-pipeline")
    columns = _columns(url)

    async def send(part: pa.RecordBatch) -> Tally:
        rest: pa.RecordBatch | None = part
        tally = Tally()
        if columns is not None:
            with suppress(StoreError):  # submitted again below, with retries
                done = await columns.store(part)
                tally, rest = Tally(created=done.created, replayed=done.replayed), done.rest
        return _counted(await _submit(queue, new_jobs(rest)) if rest else [], tally)

    rows = _size(_BATCH if columns is None else _PART, rate)
    try:
        return await _send_all(_parts(batches, rows), send, rate)
    finally:
        await queue.close()
        if columns is not None:
            await columns.close()


def _columns(url: str) -> BoxColumns | None:
    if not parse_url(url).store.startswith("postgres") or not has_part(url, "box"):
        return None
    from tenure.pipeline.source.copying import open_columns  # needs a driver that others do not

    return open_columns(url)


async def _send_all(
    parts: Iterable[Jobs], send: Callable[[Jobs], Coroutine[Any, Any, Tally]], rate: float
) -> Tally:
    """Send all parts, some at once; the next is prepared while earlier ones are in flight."""
    tally = Tally()
    flying: set[asyncio.Task[Tally]] = set()
    began, sent, coming = time.monotonic(), 0, iter(parts)
    try:
        while (part := await asyncio.to_thread(next, coming, None)) is not None:
            sent += len(part)
            if rate:
                await asyncio.sleep(max(0.0, began + sent / rate - time.monotonic()))
            flying.add(asyncio.create_task(send(part)))
            if len(flying) >= _IN_FLIGHT:
                done, flying = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    tally.add(each.result())
        for each in flying:
            tally.add(await each)
        return tally
    finally:
        for each in flying:
            each.cancel()


async def _submit(queue: Queue, jobs: list[NewJob]) -> list[Submitted]:
    """Submit one batch; waits while the queue is full, and repeats after a lost answer."""
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
        got = [_named(job, answer) for job, answer in zip(jobs, got, strict=True)]
        full = [answer for answer in got if answer.status == "full"]
        if not full:
            return answers + got
        answers += [answer for answer in got if answer.status != "full"]
        jobs = [job for job, answer in zip(jobs, got, strict=True) if answer.status == "full"]
        await asyncio.sleep(max(100, full[0].retry_after_ms) / 1000)
    return answers


def _named(job: NewJob, answer: Submitted) -> Submitted:
    """The answer; the reason of a refusal names the job, which the answer itself does not."""
    if answer.accepted:
        return answer
    reason = f"{job.job_id}: {answer.reason or answer.status}"
    return msgspec.structs.replace(answer, reason=reason)


def new_jobs(batch: pa.RecordBatch) -> list[NewJob]:
    """The jobs of some columns."""
    named = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    none = [None] * batch.num_rows
    columns = [named.get(name, none) for name in ("job_id", "task", "payload", *CONTROL)]
    return [
        NewJob(
            task=task,
            payload=(payload or "").encode(),
            job_id=job_id,
            priority=priority or 0,
            delay_ms=delay_ms or 0,
            gid=gid or "",
            max_attempts=limit,
        )
        for job_id, task, payload, priority, delay_ms, gid, limit in zip(*columns, strict=True)
    ]


def _counted(answers: Sequence[Submitted], tally: Tally) -> Tally:
    tally.count(answers)
    return tally


def _batches(jobs: Iterable[NewJob], size: int) -> Iterator[list[NewJob]]:
    rest = iter(jobs)
    while batch := list(islice(rest, size)):
        yield batch


def _parts(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        # Long payloads: fewer of them at a time.
        each = max(1, min(size, _PART_BYTES * batch.num_rows // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, each):
            yield batch.slice(start, each)


def _size(most: int, rate: float) -> int:
    """How many jobs to send at once; with a rate limit at most a quarter of a second's jobs."""
    return max(1, min(most, int(rate / 4))) if rate else most
