"""Columns of jobs that differ in ids and payloads alone, and the rows of the ledger they become.

A submit checks every job by itself. Here many jobs are handled together: values that all rows share
are checked, hashed and packed once, the others column by column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tenure.core.errors import UsageError
from tenure.core.job import NewJob, canonical
from tenure.pipeline.source.copy_format import fixed, packed, rows_of
from tenure.sql.engine import QueueSettings
from tenure.sql.postgres_engine import CopyRows, rows_of_submit
from tenure.sql.submit import COLUMNS, check
from tenure.store.postgres import Copied

_JOB_ID = "^[A-Za-z0-9_.@:-]{1,128}$"
_OWN = ("job_id", "payload", "payload_h", "request_hash")
_OPTIONS = ("task", "priority", "delay_ms", "gid", "max_attempts")
_DELAY_MS_MAX = 2**53  # the submit refuses a longer delay
_JSON = msgspec.json.Decoder(msgspec.Raw)
_PAYLOAD_H, _REQUEST_H = 8, 16  # bytes of a digest that are kept, in hexadecimal


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that differ only in ids and payloads. `model` has all other values."""

    model: NewJob
    job_id: pa.Array
    payload: pa.Array
    payload_h: pa.Array
    request_hash: pa.Array

    def __len__(self) -> int:
        return len(self.job_id)

    @property
    def columns(self) -> dict[str, pa.Array]:
        """What differs from job to job, by the names that it has in the tables."""
        return {name: getattr(self, name) for name in _OWN}

    def where(self, mask: Sequence[bool]) -> Part:
        """Some of them."""
        chosen = pa.array(mask)
        some = {name: column.filter(chosen) for name, column in self.columns.items()}
        return msgspec.structs.replace(self, **some)


class Stored(msgspec.Struct, frozen=True):
    """What became of a part; `rest` are rows that a submit must decide on."""

    created: int = 0
    replayed: int = 0
    rest: pa.RecordBatch | None = None


def part_of(batch: pa.RecordBatch) -> Part | None:
    """The jobs of a batch, checked and hashed; None if options differ or a job is invalid."""
    job_id, payload = batch.column("job_id"), batch.column("payload")
    options = {name: batch.column(name) for name in _OPTIONS if name in batch.schema.names}
    are_alike = all(pc.count_distinct(each, mode="all").as_py() == 1 for each in options.values())
    if not are_alike or job_id.null_count or payload.null_count:
        return None
    payloads = payload.cast(pa.binary()).to_pylist()
    given = {name: each[0].as_py() for name, each in options.items()}
    model = NewJob(
        task=given["task"] or "",
        payload=payloads[0],
        job_id=job_id[0].as_py(),
        priority=given.get("priority") or 0,
        delay_ms=given.get("delay_ms") or 0,
        gid=given.get("gid") or "",
        max_attempts=given.get("max_attempts"),
    )
    if not _is_sound(model, job_id, payloads):
        return None
    payload_h = _hexadecimal(payloads, _PAYLOAD_H)
    request_hash = _hexadecimal(_requests(model, payload_h), _REQUEST_H)
    return Part(
        model=model, job_id=job_id, payload=payload, payload_h=payload_h, request_hash=request_hash
    )


def _is_sound(model: NewJob, job_id: pa.Array, payloads: list[bytes]) -> bool:
    try:
        check(model, model.job_id)
        if model.delay_ms > _DELAY_MS_MAX or model.gid:  # SQL queues have no groups
            return False
        for _ in map(_JSON.decode, payloads):
            pass
    except (UsageError, msgspec.DecodeError):
        return False
    is_an_id = pc.match_substring_regex(job_id, _JOB_ID)
    return bool(pc.all(is_an_id).as_py() and pc.count_distinct(job_id).as_py() == len(job_id))


def _requests(model: NewJob, payload_h: pa.Array) -> list[bytes]:
    """What makes two submits the same, as the ledger writes it: the hash of the payload inside."""
    before = canonical([model.requester, model.task])[:-1] + b',"'
    options = [model.priority, model.delay_ms, model.max_attempts, model.ttl_ms, model.gid, None]
    after = b'",' + canonical(options)[1:]
    kind = payload_h.type
    wholes = pc.binary_join_element_wise(
        pa.scalar(before, kind), payload_h, pa.scalar(after, kind), pa.scalar(b"", kind)
    )
    hashed: list[bytes] = wholes.to_pylist()
    return hashed


def _hexadecimal(texts: list[bytes], kept: int) -> pa.Array:
    """The first bytes of every hash."""
    digests = b"".join([sha256(text).digest() for text in texts])
    heads = np.frombuffer(digests, np.uint8).reshape(len(texts), -1)[:, :kept]
    return fixed(heads.tobytes().hex().encode(), 2 * kept)


def tables_of(part: Part, head: Mapping[str, Any], settings: QueueSettings) -> list[Copied]:
    """The rows of the jobs and of their first events.

    `head` has the time, and the turns and positions that the database gave out. The ledger says
    what the rows of one job are: all that is the same in the others is taken from these.
    """
    numbers = {settings.table: head["turns"], "job_journal": head["positions"]}
    first = dict(head) | {name: head[name][:1] for name in ("turns", "positions")}
    takes = {"queue": settings.queue}
    return [
        _like(row, {"seq": pa.array(numbers[row.table]), **part.columns})
        for row in rows_of_submit(settings.table, _given(part, settings), first, takes)
    ]


def _given(part: Part, settings: QueueSettings) -> dict[str, list[Any]]:
    """The first job, as a submit gives it to the ledger."""
    model = part.model
    row = {
        **{name: column[0].as_py() for name, column in part.columns.items()},
        "task": model.task,
        "priority": model.priority,
        "delay_ms": model.delay_ms,
        "max_attempts": model.max_attempts or settings.max_attempts,
        "ttl_ms": 0,
        "gid": model.gid,
        **dict.fromkeys(("requester_id", "trace", "idempotency_key"), ""),
        **COLUMNS,
    }
    return {name: [value] for name, value in row.items()}


def _like(row: CopyRows, columns: Mapping[str, pa.Array]) -> Copied:
    """Rows like this one, which differ in these columns."""
    (first,) = row.records
    values = dict(zip(row.columns, first, strict=True))
    varying = {name: column for name, column in columns.items() if name in values}
    same = {name: packed(name, value) for name, value in values.items() if name not in varying}
    rows = rows_of(list(varying.values()), list(same.values()))
    return Copied(row.table, (*varying, *same), rows)
