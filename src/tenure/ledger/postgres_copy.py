"""Storing many jobs by COPY: the same rows as the submit statement writes, for a fraction of it.

COPY knows nothing of conflicts. It is tried where all jobs are new; when one of them turns out to
be known, nothing of it is left, and the submit statement decides job by job as it always does.

Rows are put together column by column, and a column that holds nothing but its default is left to
the server: both sides work on less.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import asyncpg

from tenure.core.errors import ServerError
from tenure.ledger.engine import INBOX, RESPONSE, Row
from tenure.ledger.postgres_rows import PackedRows
from tenure.store.postgres import Copied, Postgres

SAMPLE = 16
_KNOWN = (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError)
_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("gid", "requester_id", "trace"), ""),
    **dict.fromkeys(("priority", "due_ms", "expires_ms", "credential_version"), 0),
    **dict.fromkeys(("status_webhook_url", "refresh_url", "storage_creds_encrypted")),
    **dict.fromkeys(("storage_creds_dek_wrapped", "storage_creds_kek_id")),
    "storage_creds_encryption_version": None,
    "ready": True,
}
_NONE = object()
_NOT_OF_JOBS = ("delay_ms", "ttl_ms", "idempotency_key")
_OF_NOTES = ("job_id", "task", "gid", "priority", "due_ms", "max_attempts", "payload_h")

Columns = Mapping[str, Sequence[Any]]


async def copied(
    database: Postgres,
    begin: str,
    opening: Sequence[Any],
    parts: Callable[[Row], Iterable[Copied]],
    begins: asyncio.Lock,
) -> Row | None:
    """Copy in what `parts` makes of the answer to `begin`, all of it or nothing; that answer.

    None when some of it is known already. Two at once begin one after the other, and their jobs are
    in line in that order.
    """
    try:
        async with contextlib.AsyncExitStack() as stack:
            async with begins:
                connection = await stack.enter_async_context(database.transaction())
                head: Row | None = await connection.fetchrow(begin, *opening)
            if head is None or head["known"]:
                return None
            for part in parts(head):
                await database.copy(connection, part)
    except struct.error:  # a number that no column holds: said by the submit statement
        return None
    except ServerError as error:
        if isinstance(error.reply, _KNOWN):
            return None
        raise
    return head


def sample_of(given: Columns) -> Columns:
    """A few rows, to see by them whether what is given is known already."""
    every = max(1, len(given["job_id"]) // SAMPLE)
    return {name: values[::every] for name, values in given.items()}


def parts_of(table: str, given: Columns, head: Row, takes: Mapping[str, Any]) -> list[Copied]:
    """Keys, jobs and first events, in the order in which the submit statement writes them."""
    count, now_ms = len(given["job_id"]), head["now_ms"]
    jobs: dict[str, Sequence[Any]] = {
        name: given[name] for name in given if name not in _NOT_OF_JOBS
    }
    jobs["due_ms"] = _later(given["delay_ms"], now_ms)
    jobs["expires_ms"] = _later(given["ttl_ms"], now_ms)
    jobs["ready"] = [not delay_ms for delay_ms in given["delay_ms"]]
    notes: Columns = {name: jobs[name] for name in _OF_NOTES}
    same = {"queue": takes["queue"], "created_ms": now_ms, "updated_ms": now_ms}
    packing = PackedRows()
    noted = {"queue": takes["queue"], "ver": 1, "type": "submit", "ts_ms": now_ms}
    return [
        *_keys(packing, table, given, now_ms, takes),
        _copied(packing, table, count, {"seq": head["turns"], **jobs}, same),
        _copied(
            packing,
            "job_journal",
            count,
            {"seq": head["positions"], **notes},
            {**noted, "to_state": "queued", "listed": False},
        ),
    ]


def _keys(
    packing: PackedRows, table: str, given: Columns, now_ms: int, takes: Mapping[str, Any]
) -> list[Copied]:
    names = ("requester_id", "idempotency_key", "request_hash", "job_id")
    rows = [row for row in zip(*map(given.__getitem__, names), strict=True) if row[1]]
    if not rows:
        return []
    rows.sort()  # two batches never wait for each other's keys
    until_ms = now_ms + takes["key_ttl_ms"]
    same = {"queue": takes["queue"], "created_ms": now_ms, "expires_ms": until_ms}
    columns: dict[str, Sequence[Any]] = dict(zip(names, zip(*rows, strict=True), strict=True))
    if table == INBOX:
        columns["response"] = [job_id.join(RESPONSE) for job_id in columns["job_id"]]
    return [_copied(packing, "idempotency_keys", len(rows), columns, same, every=True)]


def _copied(
    packing: PackedRows,
    table: str,
    count: int,
    columns: Columns,
    same: Mapping[str, Any],
    *,
    every: bool = False,
) -> Copied:
    """Rows of columns, and of values that are the same in all of them."""
    told: dict[str, Sequence[Any]] = {}
    shared = dict(same)
    for name, values in columns.items():
        if values.count(values[0]) == count:
            if every or values[0] != _DEFAULTS.get(name, _NONE):
                shared[name] = values[0]
        else:
            told[name] = values
    return Copied(table, (*told, *shared), packing.rows(count, told, shared))


def _later(spans_ms: Sequence[int], now_ms: int) -> Sequence[int]:
    return [now_ms + span_ms if span_ms else 0 for span_ms in spans_ms]
