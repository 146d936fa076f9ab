"""Storing jobs: whether each can be, and what a repetition is answered."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tenure.core.errors import InvalidJob, UsageError
from tenure.core.job import NewJob, Submitted, check_key, request_hash, short_hash
from tenure.ledger.engine import IN_BULK, Engine
from tenure.ledger.ids import uuid7s
from tenure.ledger.settings import BoxSettings
from tenure.store.resending import part

FULL_RETRY_MS = 1_000
_BATCH_MAX = 2_000
_SLICE = 250
_JOB_ID = re.compile(r"[A-Za-z0-9_.@:-]{1,128}")
_INT_MAX = 2**31 - 1
AHEAD_MS_MAX = 2**53
"""How far ahead a job may be due or expire: later times leave the range of their columns."""

_JSON = msgspec.json.Decoder(msgspec.Raw)

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
_NO_COLUMNS = tuple(COLUMNS.values())

Fresh = tuple[int, tuple[Any, ...]]
"""A row to be stored, and the place of its answer."""


class Submitting:
    """Submits of one box."""

    def __init__(self, engine: Engine, settings: BoxSettings) -> None:
        self._engine = engine
        self._settings = settings

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; answers are per job and in order."""
        answers: list[Submitted | None] = [None] * len(jobs)
        repeated = _Repeated()
        storing: list[asyncio.Task[None]] = []
        several = len(jobs) > _BATCH_MAX  # then one batch may be stored where another cannot
        try:
            for start in range(0, len(jobs), _BATCH_MAX):
                fresh: list[Fresh] = []
                for at in range(start, min(start + _BATCH_MAX, len(jobs)), _SLICE):
                    stop = min(at + _SLICE, start + _BATCH_MAX)
                    fresh += self._fresh(jobs, range(at, min(stop, len(jobs))), repeated, answers)
                    if storing:
                        await asyncio.sleep(0)  # what was made before is sent meanwhile
                # Two bulks keep their turns side by side; anything smaller waits for them.
                beside = 1 if len(fresh) >= IN_BULK and not self._settings.depth_max else 0
                while len(storing) > beside:
                    await part(several, storing[0])
                    del storing[0]
                storing.append(asyncio.create_task(self._store(fresh, answers)))
            for task in storing:
                await part(several, task)
        finally:
            for task in storing:
                task.cancel()
            await asyncio.gather(*storing, return_exceptions=True)
        again = repeated.positions
        if again:
            told = await part(again, self.submit([jobs[at] for at in again]))
            for position, answer in zip(again, told, strict=True):
                answers[position] = answer
        return [answer for answer in answers if answer is not None]

    def _fresh(
        self,
        jobs: Sequence[NewJob],
        positions: range,
        repeated: _Repeated,
        answers: list[Submitted | None],
    ) -> list[Fresh]:
        """The rows of jobs that can be, each with its place; without those the batch repeats."""
        fresh: list[Fresh] = []
        ids = uuid7s(len(positions))
        for position in positions:
            job, made_id = jobs[position], next(ids)
            try:
                row = self._row(job, job.job_id or made_id)
            except UsageError as error:
                answers[position] = Submitted("", "invalid", str(error))
                continue
            if not repeated.has(position, row):
                fresh.append((position, row))
        return fresh

    async def _store(self, fresh: Sequence[Fresh], answers: list[Submitted | None]) -> None:
        if not fresh:
            return
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

    async def _look_up(self, rest: Sequence[Fresh], answers: list[Submitted | None]) -> None:
        """Not stored: known already, or no room. Asked after the submit, when rivals have ended."""
        batch = [(new[0], new[9], new[12]) for _, new in rest]
        settings = self._settings
        known = await self._engine.run(settings.table, "lookup", batch, queue=settings.queue)
        found = {row["n"]: row for row in known}
        for number, (position, new) in enumerate(rest, 1):
            row = found.get(number)
            if row is None:
                why = f"the queue holds {settings.depth_max} unfinished jobs, its limit"
                answers[position] = Submitted("", "full", why, FULL_RETRY_MS)
            elif row["request_hash"] == new[10]:
                answers[position] = Submitted(
                    row["job_id"], "replayed", response=row["response"] or ""
                )
            else:
                # Whose job has the id is not told: it may be another requester's.
                why = "this job id is taken: choose another, or leave it out"
                if not row["by_id"]:
                    why = f"this idempotency key belongs to another request: job {row['job_id']}"
                answers[position] = Submitted("", "conflict", why)

    def _row(self, job: NewJob, job_id: str) -> tuple[Any, ...]:
        payload = check(job, job_id)
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
            *(_columns(job.options) if job.options else _NO_COLUMNS),
        )


def check(job: NewJob, job_id: str) -> str:
    """The payload as text; raises what makes a job impossible to store."""
    if job.job_id and not _JOB_ID.fullmatch(job_id):
        raise UsageError(f"job id {job_id[:140]!r}: 1 to 128 of letters, digits and _ . @ : -")
    if not job.task or len(job.task) > 200 or not job.task.isprintable():
        raise UsageError(f"task {job.task[:60]!r}: 1 to 200 printable characters")
    if job.max_attempts is not None and not 1 <= job.max_attempts <= _INT_MAX:
        raise UsageError(f"max_attempts counts starts and is at least 1, not {job.max_attempts}")
    if job.delay_ms < 0 or (job.ttl_ms is not None and job.ttl_ms <= 0):
        raise InvalidJob("delay_ms cannot be negative and ttl_ms is positive or left out")
    if job.delay_ms > AHEAD_MS_MAX or (job.ttl_ms or 0) > AHEAD_MS_MAX:
        raise InvalidJob(f"delay_ms and ttl_ms are at most {AHEAD_MS_MAX} milliseconds")
    if not -_INT_MAX <= job.priority <= _INT_MAX:
        raise UsageError(f"priority {job.priority} is not a number of 32 bits")
    if job.gid or job.trace or job.requester or job.options:
        _check_texts(job)
    if job.idempotency_key:
        check_key(job.idempotency_key)
    try:
        _JSON.decode(job.payload)
        return job.payload.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the payload is not JSON: {error}") from None


def _check_texts(job: NewJob) -> None:
    for name, text in (("gid", job.gid), ("trace", job.trace), ("requester", job.requester)):
        if text and (len(text) > 512 or not text.isprintable()):
            raise UsageError(f"{name}: at most 512 printable characters")
    if job.options and (unknown := job.options.keys() - COLUMNS.keys() - {"request_hash"}):
        raise UsageError(
            f"no such job option: {', '.join(sorted(unknown))}; there are {', '.join(COLUMNS)}"
        )


class _Repeated:
    """Which jobs of a batch are the same as one before them: by id, or by key."""

    def __init__(self) -> None:
        self._seen: set[str | tuple[str, str]] = set()
        self.positions: list[int] = []

    def has(self, position: int, row: tuple[Any, ...]) -> bool:
        """Whether the batch named this job before; noted, so that it is asked for afterwards."""
        seen, job_id = self._seen, row[0]
        key = (row[9], row[12]) if row[12] else None
        if job_id in seen or key in seen:
            self.positions.append(position)
            return True
        seen.add(job_id)
        if key is not None:
            seen.add(key)
        return False


def _columns(options: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(options.get(name, default) for name, default in COLUMNS.items())


def _request_hash(job: NewJob, payload_h: str) -> str:
    """What makes two submits the same: everything but the ids, the trace and what is secret."""
    refresh_url = job.options.get("refresh_url")
    return request_hash(
        *((refresh_url,) if refresh_url else ()),
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
