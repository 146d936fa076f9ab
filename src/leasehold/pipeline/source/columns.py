"""Columns of jobs that differ in ids and payloads alone, and the rows of the ledger they become.

A submit looks at every job by itself. Here a whole part is looked at: what is the same in all its
rows is checked, hashed and packed once, and the rest by whole columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from leasehold.core.errors import UsageError
from leasehold.core.idempotency import canonical
from leasehold.core.job import NewJob
from leasehold.ledger.settings import BoxSettings
from leasehold.ledger.submitting import check
from leasehold.pipeline.source.copy_format import fixed

_JOB_ID = "^[A-Za-z0-9_.@:-]{1,128}$"
_OPTIONS = ("task", "priority", "delay_ms", "gid", "max_attempts")
_DELAY_MS_MAX = 2**53  # what is later than that is for the submit to refuse
_JSON = msgspec.json.Decoder(msgspec.Raw)
_PAYLOAD_H, _REQUEST_H = 8, 16  # bytes of a digest that are kept, in hexadecimal


Table = tuple[str, Mapping[str, pa.Array], Mapping[str, Any]]
"""The name of a table, columns of rows for it, and values that all of them share."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that differ in ids and payloads alone. `model` has all else of them."""

    model: NewJob
    job_id: pa.Array
    payload: pa.Array
    payload_h: pa.Array
    request_hash: pa.Array

    def __len__(self) -> int:
        return len(self.job_id)

    def where(self, mask: Sequence[bool]) -> Part:
        """Some of them."""
        chosen = pa.array(mask)
        names = ("job_id", "payload", "payload_h", "request_hash")
        columns = {name: getattr(self, name).filter(chosen) for name in names}
        return msgspec.structs.replace(self, **columns)


class Stored(msgspec.Struct, frozen=True):
    """What became of a part; `rest` are rows that a submit must decide on."""

    created: int = 0
    replayed: int = 0
    rest: pa.RecordBatch | None = None


def part_of(batch: pa.RecordBatch) -> Part | None:
    """The jobs of a batch, checked and hashed; None if they are not alike, or one is not sound."""
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
        if model.delay_ms > _DELAY_MS_MAX:
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


def tables_of(part: Part, head: Mapping[str, Any], settings: BoxSettings) -> list[Table]:
    """Jobs and first events, with what differs from the default of its column.

    `head` has the time, and the turns and positions that the database gave out.
    """
    model, now_ms = part.model, np.int64(head["now_ms"])
    limit = np.int32(model.max_attempts or settings.max_attempts)
    both: dict[str, Any] = {"queue": settings.queue, "task": model.task, "max_attempts": limit}
    if model.gid:
        both["gid"] = model.gid
    if model.priority:
        both["priority"] = np.int32(model.priority)
    if model.delay_ms:
        both["due_ms"] = now_ms + model.delay_ms
    jobs = {**both, "created_ms": now_ms, "updated_ms": now_ms}
    if model.delay_ms:
        jobs["ready"] = False
    noted = {**both, "ver": np.int64(1), "type": "submit", "ts_ms": now_ms, "to_state": "queued"}
    hashed = {"job_id": part.job_id, "payload_h": part.payload_h}
    asked = {"payload": part.payload, "request_hash": part.request_hash}
    turns, positions = pa.array(head["turns"]), pa.array(head["positions"])
    return [
        (settings.table, {"seq": turns, **hashed, **asked}, jobs),
        ("job_journal", {"seq": positions, **hashed}, noted),
    ]
