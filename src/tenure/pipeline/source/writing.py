"""`df.write.format("tenure")`: rows become jobs, and a row that is written twice is one job.

Options: `url` and `task` (or a column `task`). A row is identified by a column `job_id`, or by the
option `key`, which names columns ("*": all): equal keys are the same job within one `run`. The
payload is the column `payload` (JSON) if there is one, else an object of all other columns. The
columns `priority`, `delay_ms`, `gid` and `max_attempts` are options of the job. `rate` limits all
tasks together if the option `tasks` says how many there are.

Jobs are submitted in batches, several at once; a full queue is waited for, lost answers are asked
for again. Every row has its own job id, so a row that is sent again finds its job already stored.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from tenure.core.errors import Conflict, StoreError, UsageError
from tenure.core.job import NewJob, Submitted
from tenure.core.registry import has_part, open_queue, parse_url
from tenure.core.seam import Queue

if TYPE_CHECKING:
    from tenure.pipeline.source.copying import BoxColumns


CONTROL = ("priority", "delay_ms", "gid", "max_attempts")
JOBS = pa.schema(
    [
        pa.field("job_id", pa.string()),
        pa.field("task", pa.string()),
        pa.field("payload", pa.binary()),
        pa.field("priority", pa.int32()),
        pa.field("delay_ms", pa.int64()),
        pa.field("gid", pa.string()),
        pa.field("max_attempts", pa.int32()),
    ]
)

_BATCH = 2_000  # a database has costs per batch; contracts on Redis split it themselves
_PART = 5_000
_PART_BYTES = 16_000_000
_IN_FLIGHT = 3
_TRIES = 6
_REASONS_MAX = 5
_OBJECTS_A_COLLECTION = 100_000
_ACCEPTED = {"created", "replayed"}
_status = attrgetter("status")


@dataclass
class Submits(WriterCommitMessage):
    """What one task reports."""

    tally: bytes


class RowsToJobs:
    """How rows of one schema become jobs."""

    def __init__(self, options: Mapping[str, str], columns: Sequence[str]) -> None:
        self.url = options.get("url", "")
        self.rate = float(options.get("rate", 0)) / max(1, int(options.get("tasks", 1)))
        self._task = options.get("task", "")
        self._run = options.get("run", "")
        self._columns = list(columns)
        keys = [name.strip() for name in options.get("key", "").split(",") if name.strip()]
        self._keys = self._columns if keys == ["*"] else keys
        self._payload = [name for name in columns if name not in ("job_id", "task", *CONTROL)]
        self._check()

    def _check(self) -> None:
        columns = set(self._columns)
        if not self.url:
            raise UsageError("writing needs a queue: .option('url', 'streams+redis://host:6379/0')")
        if not self._task and "task" not in columns:
            raise UsageError("writing needs .option('task', NAME) or a column `task`")
        if "job_id" not in columns and not self._keys:
            raise UsageError(
                "a row needs something by which it is known when a task is repeated: a column "
                "`job_id`, or .option('key', 'column, column') ('*': all columns)"
            )
        missing = sorted(set(self._keys) - columns)
        if missing:
            raise UsageError(f"key: there is no column {missing[0]!r}; there are {sorted(columns)}")

    def columns(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The jobs of these rows, as `submit_columns` takes them."""
        for batch in batches:
            yield pa.RecordBatch.from_pylist([self._job(row) for row in batch.to_pylist()], JOBS)

    def _job(self, row: dict[str, Any]) -> dict[str, Any]:
        if "payload" in row and isinstance(row["payload"], str):
            payload = row["payload"].encode()
        else:
            payload = msgspec.json.encode({name: row[name] for name in self._payload})
        return {
            "job_id": row.get("job_id") or self._id(row),
            "task": row.get("task") or self._task,
            "payload": payload,
            **{name: row.get(name) or None for name in CONTROL},
        }

    def _id(self, row: dict[str, Any]) -> str:
        key = msgspec.json.encode([self._run, *(row[name] for name in self._keys)], order="sorted")
        return str(uuid.UUID(bytes=hashlib.sha256(key).digest()[:16]))


class JobWriter(DataSourceArrowWriter):
    """For a batch."""

    def __init__(self, options: dict[str, str], schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise UsageError("jobs are only ever added: use .mode('append')")
        self._rows = RowsToJobs(options, schema.fieldNames())
        self._may_refuse = options.get("on_refusal", "fail") == "skip"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Runs in a task."""
        columns = self._rows.columns(iterator)
        tally = submit_columns(self._rows.url, columns, rate=self._rows.rate)
        if tally.refused and not self._may_refuse:
            raise refusal(tally)
        return Submits(msgspec.json.encode(tally))

    def commit(self, messages: list[Any]) -> None:
        """Everything is in the queue already."""

    def abort(self, messages: list[Any]) -> None:
        """What is in the queue stays there: written again it is the same job."""


class JobStreamWriter(DataSourceStreamArrowWriter):
    """For a stream; a repeated micro-batch finds its jobs there."""

    def __init__(self, options: dict[str, str], schema: StructType, *, overwrite: bool) -> None:
        self._batch = JobWriter(options, schema, overwrite=overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Runs in a task."""
        return self._batch.write(iterator)

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        """Everything is in the queue already."""

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        """As for a batch."""


def refusal(tally: Tally) -> Conflict:
    """Rows that the queue did not take, with the first reasons."""
    return Conflict(f"{tally.refused} rows were refused: {'; '.join(tally.reasons)}")


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


def submit_columns(url: str, batches: Iterable[pa.RecordBatch], *, rate: float = 0.0) -> Tally:
    """Put jobs into a queue, at most `rate` a second (0: as fast as it goes).

    Their columns are `job_id`, `task`, `payload` (JSON), and of `CONTROL` those there are.
    """
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
    parts: Iterable[pa.RecordBatch],
    send: Callable[[pa.RecordBatch], Coroutine[Any, Any, Tally]],
    rate: float,
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
    named["payload"] = batch.column("payload").cast(pa.binary()).to_pylist()
    none = [None] * batch.num_rows
    columns = [named.get(name, none) for name in ("job_id", "task", "payload", *CONTROL)]
    return [
        NewJob(
            task=task,
            payload=payload or b"",
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


def _parts(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        # Long payloads: fewer of them at a time.
        each = max(1, min(size, _PART_BYTES * batch.num_rows // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, each):
            yield batch.slice(start, each)


def _size(most: int, rate: float) -> int:
    """How many jobs to send at once; with a rate limit at most a quarter of a second's jobs."""
    return max(1, min(most, int(rate / 4))) if rate else most
