"""Storing many jobs by COPY: the same rows as the submit statement writes, for a fraction of it.

COPY knows nothing of conflicts. It is tried where all jobs are new; when one of them turns out to
be known, nothing of it is left, and the submit statement decides job by job as it always does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg

from leasehold.core.errors import ServerError
from leasehold.ledger.engine import Row
from leasehold.store.postgres import Copied, Postgres
from leasehold.store.statements import Operation

WORTH_IT = 500
"""From so many jobs on: COPY costs five round trips instead of one."""

_SAMPLE = 16
_KNOWN = (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError)
_JOB_COLUMNS = (
    *("job_id", "task", "payload", "payload_h", "priority", "max_attempts", "gid", "requester_id"),
    *("request_hash", "trace", "status_webhook_url", "refresh_url", "credential_version"),
    *("storage_creds_encrypted", "storage_creds_dek_wrapped", "storage_creds_kek_id"),
    *("storage_creds_encryption_version", "queue", "ready", "due_ms", "expires_ms"),
    *("created_ms", "updated_ms"),
)
_NOTE_COLUMNS = (
    *("queue", "job_id", "ver", "type", "ts_ms", "task", "to_state", "gid", "priority", "due_ms"),
    *("max_attempts", "payload_h"),
)
_KEY_COLUMNS = (
    *("queue", "requester_id", "idempotency_key", "request_hash", "job_id", "created_ms"),
    "expires_ms",
)


async def copied(
    database: Postgres,
    begin: Operation,
    table: str,
    batch: Sequence[Sequence[Any]],
    takes: Mapping[str, Any],
) -> Sequence[Row] | None:
    """What the submit statement would return; None when some of the jobs are known already."""
    every = max(1, len(batch) // _SAMPLE)
    sample = [(row[0], row[9], row[12]) for row in batch[::every]]
    opening = [list(column) for column in zip(*sample, strict=True)]
    opening += [takes[name] for name in begin.takes]
    try:
        async with database.transaction() as connection:
            head = await connection.fetchrow(begin.statements[0], *opening)
            if head is None or head["known"]:
                return None
            now_ms = head["now_ms"]
            for part in _parts(table, batch, takes["queue"], now_ms, takes["key_ttl_ms"]):
                await database.copy(connection, part)
    except ServerError as error:
        if isinstance(error.reply, _KNOWN):
            return None
        raise
    return [{"job_id": row[0], "created_ms": now_ms} for row in batch]


def _parts(
    table: str, batch: Sequence[Sequence[Any]], queue: str, now_ms: int, key_ttl_ms: int
) -> list[Copied]:
    """Keys, jobs and first events, in the order in which the submit statement writes them."""
    keys, jobs, notes = [], [], []
    for row in batch:
        (job_id, task, payload, payload_h, priority, delay_ms, max_attempts, ttl_ms, gid) = row[:9]
        requester_id, request_hash, trace, key = row[9:13]
        due_ms = now_ms + delay_ms if delay_ms else 0
        expires_ms = now_ms + ttl_ms if ttl_ms else 0
        jobs.append(
            (
                *(job_id, task, payload, payload_h, priority, max_attempts, gid, requester_id),
                *(request_hash, trace, *row[13:], queue, not delay_ms, due_ms, expires_ms),
                *(now_ms, now_ms),
            )
        )
        notes.append(
            (
                *(queue, job_id, 1, "submit", now_ms, task, "queued", gid, priority, due_ms),
                *(max_attempts, payload_h),
            )
        )
        if key:
            known_until = now_ms + key_ttl_ms
            keys.append((queue, requester_id, key, request_hash, job_id, now_ms, known_until))
    keys.sort(key=lambda row: row[1:3])  # two batches never wait for each other's keys
    return [
        *([Copied("idempotency_keys", _KEY_COLUMNS, keys)] if keys else []),
        Copied(table, _JOB_COLUMNS, jobs),
        Copied("job_journal", _NOTE_COLUMNS, notes),
    ]
