"""Submit jobs: validate each one, store the new ones, answer repeated ones."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tenure.core.encoding import short_hash
from tenure.core.errors import InvalidJob, UsageError
from tenure.core.job import NewJob, Submitted, check_key, request_hash
from tenure.core.portable import check_job_options
from tenure.sql.engine import IN_BULK, Engine, QueueSettings
from tenure.store.resend import run_step

AHEAD_MS_MAX = 2**53
"""How far ahead a job may be due or expire: later times leave the range of their columns."""

# The job options of the inbox, which are columns, with their defaults.
COLUMNS: Mapping[str, Any] = {
    "status_webhook_url": None,
    "refresh_url": None,
    "credential_version": 0,
    "storage_creds_encrypted": None,
    "storage_creds_dek_wrapped": None,
    "storage_creds_kek_id": None,
    "storage_creds_encryption_version": None,
}
_DEFAULT_COLUMNS = tuple(COLUMNS.values())
_FULL_RETRY_MS = 1_000
_BATCH_MAX = 2_000
_SLICE = 250
_JOB_ID = re.compile(r"[A-Za-z0-9_.@:-]{1,128}")
# A requester that could take such an id could take the place of a scheduled or chained job.
_PLANNED_ID = re.compile(r"[A-Za-z0-9_.-]{1,100}@[0-9]+(\.[0-9]+)?")
_INT_MAX = 2**31 - 1
_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
_decode_raw = msgspec.json.Decoder(msgspec.Raw).decode

_NewRow = tuple[int, tuple[Any, ...]]
"""The position of a job in the submit, and its row."""


async def submit_jobs(
    engine: Engine, settings: QueueSettings, jobs: Sequence[NewJob]
) -> list[Submitted]:
    """Store jobs; answers are per job and in order."""
    answers: dict[int, Submitted] = {}
    first: dict[str | tuple[str, str], int] = {}
    repeated: list[_NewRow] = []
    storing: list[asyncio.Task[None]] = []
    several = len(jobs) > _BATCH_MAX  # then one batch may be stored and another may fail
    try:
        for start in range(0, len(jobs), _BATCH_MAX):
            fresh: list[_NewRow] = []
            end = min(start + _BATCH_MAX, len(jobs))
            for at in range(start, end, _SLICE):
                positions = range(at, min(at + _SLICE, end))
                for position, row in _rows(settings, jobs, positions, answers):
                    is_first = _first_position(position, row, first) == position
                    (fresh if is_first else repeated).append((position, row))
                if storing:
                    await asyncio.sleep(0)  # let the batch before be sent in the meantime
            # Two bulk submits may run at once and keep their order; a smaller one waits for them.
            beside = 1 if len(fresh) >= IN_BULK and not settings.depth_max else 0
            while len(storing) > beside:
                await run_step(storing[0], executed_before=several)
                del storing[0]
            storing.append(asyncio.create_task(_store(engine, settings, fresh, answers)))
        for task in storing:
            await run_step(task, executed_before=several)
    finally:
        for task in storing:
            task.cancel()
        await asyncio.gather(*storing, return_exceptions=True)
    while repeated:
        again = _store_repeated(engine, settings, repeated, answers)
        repeated = await run_step(again, executed_before=True)
    return [answers[at] for at in range(len(jobs))]


def _rows(
    settings: QueueSettings,
    jobs: Sequence[NewJob],
    positions: range,
    answers: dict[int, Submitted],
) -> Iterator[_NewRow]:
    """The rows of valid jobs; the others get their answer."""
    for position, made_id in zip(positions, _uuid7s(len(positions)), strict=True):
        job = jobs[position]
        try:
            yield position, _row(settings, job, job.job_id or made_id)
        except UsageError as error:
            answers[position] = Submitted("", "invalid", str(error))


def _first_position(
    position: int, row: tuple[Any, ...], first: dict[str | tuple[str, str], int]
) -> int:
    """The position of the first job of the submit that has this id or this key."""
    job_id, requester, key = row[0], row[9], row[12]
    found = first.get(job_id)
    if found is None and key:
        found = first.get((requester, key))
    if found is not None:
        return found
    first[job_id] = position
    if key:
        first[requester, key] = position
    return position


async def _store(
    engine: Engine,
    settings: QueueSettings,
    fresh: Sequence[_NewRow],
    answers: dict[int, Submitted],
) -> None:
    if not fresh:
        return
    stored = await engine.run(
        settings.table,
        "submit",
        [row for _, row in fresh],
        queue=settings.queue,
        depth_max=settings.depth_max,
        key_ttl_ms=settings.idempotency_ms,
        channel=engine.channel,
    )
    positions = {row[0]: position for position, row in fresh}
    for row in stored:
        job_id = row["job_id"]
        answers[positions[job_id]] = Submitted(job_id, "created", created_ms=row["created_ms"])
    if len(stored) == len(fresh):
        return
    # The others are known already, or the queue is full. The lookup comes after the submit, when
    # concurrent submits of the same keys have ended.
    rest = [(position, row) for position, row in fresh if position not in answers]
    for (position, row), found in zip(rest, await _find(engine, settings, rest), strict=True):
        answers[position] = _answer(settings, row, found)


async def _find(engine: Engine, settings: QueueSettings, rows: Sequence[_NewRow]) -> list[Any]:
    """For each row the stored job that has its id or key, or None."""
    batch = [(row[0], row[9], row[12]) for _, row in rows]
    known = await engine.run(settings.table, "lookup", batch, queue=settings.queue)
    found = {row["n"]: row for row in known}
    return [found.get(number) for number in range(1, len(rows) + 1)]


async def _store_repeated(
    engine: Engine,
    settings: QueueSettings,
    repeated: Sequence[_NewRow],
    answers: dict[int, Submitted],
) -> list[_NewRow]:
    """Answer jobs that repeat an earlier one of their submit, as a later submit would.

    Most are known by now. If the earlier job was refused, the next one with its id or key is
    stored; if the queue is full, the others get that answer too. Returns those without an answer.
    """
    unknown: list[_NewRow] = []
    for start in range(0, len(repeated), _BATCH_MAX):
        batch = repeated[start : start + _BATCH_MAX]
        for new, found in zip(batch, await _find(engine, settings, batch), strict=True):
            if found is None:
                unknown.append(new)
            else:
                answers[new[0]] = _answer(settings, new[1], found)
    first: dict[str | tuple[str, str], int] = {}
    firsts = [_first_position(*new, first) for new in unknown]
    fresh = [new for new, at in zip(unknown, firsts, strict=True) if new[0] == at]
    for start in range(0, len(fresh), _BATCH_MAX):
        await _store(engine, settings, fresh[start : start + _BATCH_MAX], answers)
    left: list[_NewRow] = []
    for new, at in zip(unknown, firsts, strict=True):
        if new[0] == at:
            continue
        if answers[at].status == "full":
            answers[new[0]] = answers[at]
        else:
            left.append(new)
    return left


def _answer(settings: QueueSettings, row: tuple[Any, ...], found: Any) -> Submitted:
    """The answer to a job that was not stored; `found` is the job that has its id or key."""
    if found is None:
        why = f"the queue holds {settings.depth_max} unfinished jobs, its limit"
        return Submitted("", "full", why, _FULL_RETRY_MS)
    if found["request_hash"] == row[10]:
        return Submitted(found["job_id"], "replayed", response=found["response"] or "")
    if found["by_id"]:  # the job may be another requester's, so nothing is said about it
        return Submitted("", "conflict", "this job id is taken: choose another, or leave it out")
    why = f"this idempotency key belongs to another request: job {found['job_id']}"
    return Submitted("", "conflict", why)


def _row(settings: QueueSettings, job: NewJob, job_id: str) -> tuple[Any, ...]:
    """The columns of the batch of the statement `submit`."""
    payload = check(job, job_id)
    if job.gid:  # the column is that of events; no claim of jobs looks at it
        check_job_options(settings.contract, job)
    payload_h = short_hash(job.payload)
    options = job.options
    return (
        job_id,
        job.task,
        payload,
        payload_h,
        job.priority,
        job.delay_ms,
        job.max_attempts or settings.max_attempts,
        job.ttl_ms or 0,
        job.gid,
        job.requester,
        options.get("request_hash") or _request_hash(job, payload_h),
        job.trace,
        job.idempotency_key,
        *([options.get(*column) for column in COLUMNS.items()] if options else _DEFAULT_COLUMNS),
    )


def _check_id(job: NewJob, job_id: str) -> None:
    if job.job_id and not _JOB_ID.fullmatch(job_id):
        raise UsageError(f"job id {job_id[:140]!r}: 1 to 128 of letters, digits and _ . @ : -")
    if job.requester and _PLANNED_ID.fullmatch(job.job_id):
        raise UsageError(
            f"job id {job_id[:140]!r}: an @ and a number at the end are for the jobs of schedules "
            "and chains; choose another id"
        )


def check(job: NewJob, job_id: str) -> str:
    """The payload as text; raises if the job cannot be stored."""
    _check_id(job, job_id)
    if not job.task or len(job.task) > 200 or not job.task.isprintable():
        raise UsageError(f"task {job.task[:60]!r}: 1 to 200 printable characters")
    if job.max_attempts is not None and not 1 <= job.max_attempts <= _INT_MAX:
        raise UsageError(
            f"max_attempts counts starts and is from 1 to {_INT_MAX}, not {job.max_attempts}"
        )
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
        _decode_raw(job.payload)
        return job.payload.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the payload is not JSON: {error}") from None


def _check_texts(job: NewJob) -> None:
    for name, text in (("gid", job.gid), ("trace", job.trace), ("requester", job.requester)):
        if text and (len(text) > 512 or not text.isprintable()):
            raise UsageError(f"{name}: at most 512 printable characters")
    if job.options and (unknown := job.options.keys() - COLUMNS.keys() - {"request_hash"}):
        raise UsageError(
            f"no such job option: {', '.join(sorted(unknown))}; there are {', '.join(COLUMNS)}"
        )


def _request_hash(job: NewJob, payload_h: str) -> str:
    """The hash that two submits of the same job share: of all but ids, trace and secrets."""
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


def uuid7() -> str:
    """A version 7 UUID: ids sort by age, so that a table grows at one end of its index."""
    return next(_uuid7s(1))


def _uuid7s(count: int) -> Iterator[str]:
    """`count` UUIDs of one moment, in rising order: 48 bits of milliseconds, then random bits."""
    time_h = f"{time.time_ns() // 1_000_000:012x}"
    head = f"{time_h[:8]}-{time_h[8:]}-7"
    random = os.urandom(10 * count).hex()
    tails = [
        f"{random[at : at + 3]}-{_VARIANT[random[at + 3]]}{random[at + 4 : at + 7]}"
        f"-{random[at + 7 : at + 19]}"
        for at in range(0, len(random), 20)
    ]
    tails.sort()
    return (head + tail for tail in tails)
