"""Writes columns of jobs into a ledger on PostgreSQL by COPY: the same rows as a submit writes.

A submit checks every job by itself. Here jobs that differ in ids and payloads alone are handled
together: values that all rows share are checked, hashed and packed once, the others column by
column. Arrow's kernel that joins columns element by element writes all rows one after the other
into a single buffer, in the binary format of COPY, without a loop over the rows.

Jobs that need more checks (an id used twice, a payload that is not JSON, options that differ from
row to row) are left to the submit, which answers job by job. Ids make it safe to send jobs again: a
job that is stored already is found by its id, and counts as replayed if the request is the same.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tenure.core.errors import UsageError
from tenure.core.job import NewJob, canonical
from tenure.core.registry import open_part
from tenure.sql.engine import QueueSettings, Row
from tenure.sql.postgres_engine import SAMPLE, CopyRows, PostgresEngine, rows_of_submit
from tenure.sql.submit import COLUMNS, check
from tenure.store.postgres import Connection, Copied


class BoxColumns:
    """Puts columns of jobs into one box on PostgreSQL, for one event loop."""

    def __init__(self, engine: PostgresEngine, settings: QueueSettings) -> None:
        self._engine = engine
        self._settings = settings

    async def store(self, batch: pa.RecordBatch) -> Stored:
        """Store the jobs that COPY can store."""
        part = part_of(batch)
        if part is None:
            return Stored(rest=batch)
        ids = part.job_id[:: max(1, len(part) // SAMPLE)].to_pylist()
        if await self._copied(part, ids):
            return Stored(created=len(part))
        return await self._store_unknown(part, batch)

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.close()

    async def _store_unknown(self, part: Part, batch: pa.RecordBatch) -> Stored:
        """If some ids exist: jobs with the same request are done, all other jobs are new."""
        asked = [(job_id, "", "") for job_id in part.job_id.to_pylist()]
        settings = self._settings
        found = await self._engine.run(settings.table, "lookup", asked, queue=settings.queue)
        hashes = part.request_hash.to_pylist()
        known = {row["n"] - 1 for row in found}
        same = {at for row in found if hashes[at := row["n"] - 1] == row["request_hash"].encode()}
        fresh = [at not in known for at in range(len(part))]
        if len(known) == len(same) and (not any(fresh) or await self._copied(part.where(fresh))):
            return Stored(created=len(part) - len(same), replayed=len(same))
        rest = [at not in same for at in range(len(part))]
        return Stored(replayed=len(same), rest=batch.filter(pa.array(rest)))

    async def _copied(self, part: Part, sample: Sequence[str] = ()) -> bool:
        """Store all jobs, or none if one exists already; a sample of ids is checked first."""
        none = [""] * len(sample)
        database = self._engine.database

        async def write(connection: Connection, head: Row) -> None:
            for rows in tables_of(part, head, self._settings):
                await database.copy(connection, rows)

        head = await self._engine.copy(
            *(self._settings.table, self._settings.queue, len(part)),
            {"job_id": sample, "requester_id": none, "idempotency_key": none},
            write,
        )
        return head is not None


def open_columns(url: str) -> BoxColumns | None:
    """The box behind a PostgreSQL URL; None if it limits its depth, because COPY does not count."""
    engine, settings = open_part(url, "box")
    return None if settings.depth_max else BoxColumns(engine, settings)


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


_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TAIL = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_BYTES = pa.large_binary()  # a batch of long payloads is longer than 2 GB
_SHORT_COLUMNS = frozenset(
    ("priority", "max_attempts", "credential_version", "storage_creds_encryption_version")
)
_NOTHING = pa.scalar(b"", _BYTES)

RowPart: TypeAlias = "bytes | pa.Array"
"""A part of each row: the same bytes in all rows, or one element per row."""


def rows_of(columns: Sequence[pa.Array], same: Sequence[bytes | None]) -> bytes:
    """Rows of these columns, and after them of values that are the same in all.

    Texts and bytes go as they are, whole numbers with the width of their type.
    """
    parts: list[RowPart] = [struct.pack(">h", len(columns) + len(same))]
    for column in columns:
        parts += _fields(column)
    parts += [_NULL if value is None else _length(value) + value for value in same]
    joined = pc.binary_join_element_wise(*map(_operand, _merged(parts)), _NOTHING)
    return b"".join((_HEAD, _data(joined), _TAIL))


def packed(name: str, value: Any) -> bytes | None:
    """A single value. Its type follows from the value: text, bytes, boolean, and numbers of 64
    bits, but for the columns that are known as short.
    """
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return bytes([value])
    if isinstance(value, int):
        return value.to_bytes(4 if name in _SHORT_COLUMNS else 8, "big", signed=True)
    return str(value).encode()


def fixed(data: bytes, width: int) -> pa.Array:
    """Elements of one width, cut from their bytes."""
    offsets = np.arange(0, len(data) + 1, width, dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(_BYTES, len(offsets) - 1, buffers)


def _fields(column: pa.Array) -> list[RowPart]:
    if pa.types.is_integer(column.type):
        numbers = column.to_numpy().astype(f">i{column.type.bit_width // 8}")
        width = numbers.dtype.itemsize
        return [struct.pack(">i", width), fixed(numbers.tobytes(), width)]
    texts = column.cast(_BYTES)
    lengths = pc.binary_length(texts).to_numpy()
    return [fixed(lengths.astype(">i4").tobytes(), 4), texts]


def _length(value: bytes) -> bytes:
    return struct.pack(">i", len(value))


def _merged(parts: list[RowPart]) -> list[RowPart]:
    """Merge neighbouring parts that are the same in all rows."""
    merged: list[RowPart] = []
    for part in parts:
        if merged and isinstance(part, bytes) and isinstance(merged[-1], bytes):
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def _operand(part: RowPart) -> pa.Array | pa.Scalar:
    return pa.scalar(part, _BYTES) if isinstance(part, bytes) else part


def _data(joined: pa.Array) -> bytes:
    _, _, data = joined.buffers()
    return bytes(memoryview(data)[: joined.total_values_length])
