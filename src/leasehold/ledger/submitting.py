"""Storing jobs: whether each can be, and what a repetition is answered."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from leasehold.core.errors import UsageError
from leasehold.core.idempotency import check_key, request_hash, short_hash
from leasehold.core.job import NewJob, Submitted
from leasehold.ledger.engine import Engine
from leasehold.ledger.ids import uuid7
from leasehold.ledger.settings import BoxSettings

FULL_RETRY_MS = 1_000
_BATCH_MAX = 2_000
_JOB_ID = re.compile(r"[A-Za-z0-9_.@:-]{1,128}")
_INT_MAX = 2**31 - 1

# What only the inbox knows of a job, and where it is kept.
COLUMNS: Mapping[str, Any] = {
    "status_webhook_url": None,
    "refresh_url": None,
    "credential_version": 0,
    "storage_creds_encrypted": None,
    "storage_creds_dek_wrapped": None,
    "storage_creds_kek_id": None,
    "storage_creds_encryption_version": None,
}


class Submitting:
    """Submits of one box."""

    def __init__(self, engine: Engine, settings: BoxSettings) -> None:
        self._engine = engine
        self._settings = settings

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; answers are per job and in order."""
        answers: list[Submitted | None] = [None] * len(jobs)
        fresh: list[tuple[int, tuple[Any, ...]]] = []
        firsts: dict[tuple[str, ...], int] = {}
        again: list[int] = []
        for position, job in enumerate(jobs):
            try:
                row = self._row(job)
            except UsageError as error:
                answers[position] = Submitted(job.job_id, "invalid", str(error))
                continue
            names = _names(row)
            if any(name in firsts for name in names):  # a repetition within the batch
                again.append(position)
                continue
            firsts.update(dict.fromkeys(names, position))
            fresh.append((position, row))
        for start in range(0, len(fresh), _BATCH_MAX):
            await self._store(fresh[start : start + _BATCH_MAX], answers)
        if again:
            for position, answer in zip(
                again, await self.submit([jobs[at] for at in again]), strict=True
            ):
                answers[position] = answer
        return [answer for answer in answers if answer is not None]

    async def _store(
        self, fresh: Sequence[tuple[int, tuple[Any, ...]]], answers: list[Submitted | None]
    ) -> None:
        settings = self._settings
        stored = await self._engine.run(
            settings.table,
            "submit",
            [row for _, row in fresh],
            queue=settings.queue,
            depth_max=settings.depth_max,
            key_ttl_ms=settings.idempotency_ms,
            channel=self._engine.channel,
        )
        positions = {row[0]: position for position, row in fresh}
        for row in stored:
            job_id = row["job_id"]
            answers[positions[job_id]] = Submitted(job_id, "created", created_ms=row["created_ms"])
        rest = [(position, new) for position, new in fresh if answers[position] is None]
        if rest:
            await self._look_up(rest, answers)

    async def _look_up(
        self, rest: Sequence[tuple[int, tuple[Any, ...]]], answers: list[Submitted | None]
    ) -> None:
        """Not stored: known already, or no room. Asked after the submit, when rivals have ended."""
        batch = [(new[0], new[9], new[12]) for _, new in rest]
        settings = self._settings
        known = await self._engine.run(settings.table, "lookup", batch, queue=settings.queue)
        found = {row["n"]: row for row in known}
        for number, (position, new) in enumerate(rest, 1):
            row = found.get(number)
            if row is None:
                why = f"the queue holds {settings.depth_max} unfinished jobs, its limit"
                answers[position] = Submitted(new[0], "full", why, FULL_RETRY_MS)
            elif row["request_hash"] == new[10]:
                answers[position] = Submitted(row["job_id"], "replayed")
            else:
                named = "job id" if row["by_id"] else "idempotency key"
                why = f"this {named} belongs to another request: job {row['job_id']}"
                answers[position] = Submitted(new[0], "conflict", why)

    def _row(self, job: NewJob) -> tuple[Any, ...]:
        job_id = job.job_id or uuid7()
        check(job, job_id)
        extra = {**COLUMNS, **job.options}
        payload = job.payload.decode()
        payload_h = short_hash(job.payload)
        return (
            job_id,
            job.task,
            payload,
            payload_h,
            job.priority,
            job.delay_ms,
            job.max_attempts or self._settings.max_attempts,
            job.ttl_ms or 0,
            job.gid,
            job.requester,
            job.options.get("request_hash") or _request_hash(job, payload_h),
            job.trace,
            job.idempotency_key,
            *(extra[name] for name in COLUMNS),
        )


def check(job: NewJob, job_id: str) -> None:
    """Raise what makes a job impossible to store."""
    if not _JOB_ID.fullmatch(job_id):
        raise UsageError(f"job id {job_id[:140]!r}: 1 to 128 of letters, digits and _ . @ : -")
    if not job.task or len(job.task) > 200 or not job.task.isprintable():
        raise UsageError(f"task {job.task[:60]!r}: 1 to 200 printable characters")
    if job.max_attempts is not None and not 1 <= job.max_attempts <= _INT_MAX:
        raise UsageError(f"max_attempts counts starts and is at least 1, not {job.max_attempts}")
    if job.delay_ms < 0 or (job.ttl_ms is not None and job.ttl_ms <= 0):
        raise UsageError("delay_ms cannot be negative and ttl_ms is positive or left out")
    if not -_INT_MAX <= job.priority <= _INT_MAX:
        raise UsageError(f"priority {job.priority} is not a number of 32 bits")
    _check_texts(job)
    try:
        msgspec.json.decode(job.payload, type=msgspec.Raw)
        job.payload.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the payload is not JSON: {error}") from None


def _check_texts(job: NewJob) -> None:
    for name, text in (("gid", job.gid), ("trace", job.trace), ("requester", job.requester)):
        if len(text) > 512 or (text and not text.isprintable()):
            raise UsageError(f"{name}: at most 512 printable characters")
    unknown = job.options.keys() - COLUMNS.keys() - {"request_hash"}
    if unknown:
        raise UsageError(
            f"no such job option: {', '.join(sorted(unknown))}; there are {', '.join(COLUMNS)}"
        )
    if job.idempotency_key:
        check_key(job.idempotency_key)


def _names(row: tuple[Any, ...]) -> list[tuple[str, ...]]:
    """What makes two jobs of one batch the same job."""
    names: list[tuple[str, ...]] = [("id", row[0])]
    if row[12]:
        names.append(("key", row[9], row[12]))
    return names


def _request_hash(job: NewJob, payload_h: str) -> str:
    """What makes two submits the same: everything but the ids, the trace and what is secret."""
    return request_hash(
        job.requester,
        job.task,
        payload_h,
        job.priority,
        job.delay_ms,
        job.max_attempts,
        job.ttl_ms,
        job.gid,
        job.options.get("status_webhook_url"),
    )
