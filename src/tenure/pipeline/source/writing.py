"""`df.write.format("tenure")`: rows become jobs, and a row that is written twice is one job.

Options: `url` and `task` (or a column `task`). A row is identified by a column `job_id`, or by the
option `key`, which names columns ("*": all): equal keys are the same job within one `run`. The
payload is the column `payload` (JSON) if there is one, else an object of all other columns. The
columns `priority`, `delay_ms`, `gid` and `max_attempts` are options of the job. `rate` limits all
tasks together if the option `tasks` says how many there are.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from tenure.core.errors import Conflict, UsageError
from tenure.core.job import NewJob
from tenure.pipeline.source.submitting import Tally, submit_all

CONTROL = ("job_id", "task", "priority", "delay_ms", "gid", "max_attempts")


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
        self._payload = [name for name in columns if name not in CONTROL]
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

    def jobs(self, batches: Iterator[pa.RecordBatch]) -> Iterator[NewJob]:
        """The jobs of these rows."""
        for batch in batches:
            for row in batch.to_pylist():
                yield self._job(row)

    def _job(self, row: dict[str, Any]) -> NewJob:
        if "payload" in row and isinstance(row["payload"], str):
            payload = row["payload"].encode()
        else:
            payload = msgspec.json.encode({name: row[name] for name in self._payload})
        limit = row.get("max_attempts")
        return NewJob(
            task=row.get("task") or self._task,
            payload=payload,
            job_id=row.get("job_id") or self._id(row),
            priority=row.get("priority") or 0,
            delay_ms=row.get("delay_ms") or 0,
            gid=row.get("gid") or "",
            max_attempts=int(limit) if limit else None,
        )

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
        tally = submit_all(self._rows.url, self._rows.jobs(iterator), rate=self._rows.rate)
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
