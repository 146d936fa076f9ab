"""A new job as the add script takes it, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tenure.contracts.bullmq import job_options
from tenure.contracts.bullmq.options import Options
from tenure.core.errors import InvalidJob
from tenure.core.job import (
    NewJob,
    Submitted,
    check_job,
    request_hash,
    scoped_key,
    short_hash,
    submitted,
)
from tenure.store.redis import Arg

_EXACT_MAX = 2**53
_plain_opts: dict[tuple[int, int, int], bytes] = {}


def row(job: NewJob, options: Options) -> tuple[Arg, ...]:
    """The eighteen arguments of one job, in the order of add-16.lua; raises `InvalidJob`."""
    _check(job)
    payload_h = short_hash(job.payload)
    key = scoped_key(job.requester, job.idempotency_key) if job.idempotency_key else ""
    same = request_hash(job.task, payload_h, job.requester, job.max_attempts) if key else ""
    attempts = job.max_attempts or 0
    if job.options or job.trace:
        given = job_options.spelled(job.options)
        return _row(job, given, attempts, key, same, payload_h)
    packed = _packed_plain(attempts, job.delay_ms, job.priority)
    return (
        job.job_id, job.task, job.payload, packed, "", job.delay_ms, job.priority, "", "", "", "",
        "", "", "", key, same, attempts, payload_h,
    )  # fmt: skip


def _packed_plain(attempts: int, delay_ms: int, priority: int) -> bytes:
    """The options of most jobs, kept because they repeat."""
    key = (attempts, delay_ms, priority)
    packed = _plain_opts.get(key)
    if packed is None:
        given: dict[str, Any] = {"attempts": attempts}
        if delay_ms:
            given["delay"] = delay_ms
        if priority:
            given["priority"] = priority
        packed = job_options.pack(given)
        if len(_plain_opts) > 1_000:
            _plain_opts.clear()
        _plain_opts[key] = packed
    return packed


def _row(
    job: NewJob, given: dict[str, Any], attempts: int, key: str, same: str, payload_h: str
) -> tuple[Arg, ...]:
    if attempts:
        given["attempts"] = attempts
    if job.priority:
        given["priority"] = job.priority
    if job.delay_ms:
        given["delay"] = job.delay_ms
    if job.trace and not {"telemetryMetadata", "tm", "omitContext", "omc"} & given.keys():
        carrier = msgspec.json.encode({"traceparent": job.trace}).decode()
        given["telemetryMetadata"] = carrier
    job_id = str(given.get("jobId") or job.job_id)
    if job_id:
        given["jobId"] = job_id
        check_id(job_id)
    return full_row(job.task, job.payload, given, key=key, same=same, payload_h=payload_h)


def full_row(
    name: str,
    data: bytes,
    given: Mapping[str, Any],
    *,
    key: str = "",
    same: str = "",
    payload_h: str = "",
    waits_children: bool = False,
) -> tuple[Arg, ...]:
    """The arguments of a job with any options, under their long names."""
    check_options(given)
    size_limit = given.get("sizeLimit")
    if size_limit is not None and not _is_number(size_limit):
        raise InvalidJob(f"sizeLimit {size_limit!r}: a number of bytes")
    if size_limit and len(data) > size_limit:
        raise InvalidJob(f"The size of job {name} exceeds the limit {size_limit} bytes")
    parent_key, parent = _parent(given)
    dedup_id, dedup_ttl, dedup_mode = _dedup(given)
    return (
        str(given.get("jobId") or ""),
        name,
        data,
        job_options.pack(given),
        given.get("timestamp") or "",
        int(given.get("delay") or 0),
        int(given.get("priority") or 0),
        "1" if given.get("lifo") is True else "",
        parent_key,
        parent,
        dedup_id,
        dedup_ttl,
        dedup_mode,
        "1" if waits_children else "",
        key,
        same,
        int(given.get("attempts") or 0),
        payload_h or short_hash(data),
    )


def answer(status: str, job_id: str, options: Options) -> Submitted:
    """What the script's word for one job means on the seam."""
    match status:
        case "deduplicated":
            return Submitted(job_id, "replayed")
        case "orphan":
            return Submitted("", "invalid", "the parent it names does not exist")
        case _:
            return submitted(status, job_id, depth_max=options.max_depth)


def check_id(job_id: str) -> None:
    """Refuse ids that BullMQ's clients refuse, or take for something else."""
    if job_id.isdecimal():
        raise InvalidJob(f"job id {job_id!r}: an id of one's own is not a whole number in BullMQ")
    if ":" in job_id and len(job_id.split(":")) != 3:
        raise InvalidJob(f"job id {job_id!r}: an id of one's own has no colon in BullMQ")


def check_options(given: Mapping[str, Any]) -> None:
    """Refuse option values that no BullMQ client would accept."""
    priority = given.get("priority") or 0
    if not isinstance(priority, int) or not 0 <= priority <= job_options.PRIORITY_MAX:
        raise InvalidJob(
            f"priority {priority!r}: a whole number from 0 to {job_options.PRIORITY_MAX}"
        )
    delay = given.get("delay") or 0
    if not _is_number(delay) or not 0 <= delay < _EXACT_MAX:
        raise InvalidJob(f"delay {delay!r}: milliseconds, not negative")
    attempts = given.get("attempts") or 0
    if not _is_number(attempts) or not abs(attempts) < _EXACT_MAX:
        raise InvalidJob(f"attempts {attempts!r}: a whole number")
    stamp = given.get("timestamp") or 0
    if not _is_number(stamp) or not 0 <= stamp < _EXACT_MAX:
        raise InvalidJob(f"timestamp {stamp!r}: milliseconds since 1970")
    ttl = told.get("ttl") if isinstance(told := given.get("deduplication"), Mapping) else None
    if ttl is not None and not (_is_number(ttl) and 0 <= ttl < _EXACT_MAX):
        raise InvalidJob(f"deduplication ttl {ttl!r}: milliseconds, not negative")
    if given.get("deduplication") is not None and not _dedup(given)[0]:
        raise InvalidJob("deduplication needs an id, as in {'id': 'order-17', 'ttl': 5000}")
    given_of = (word for word in job_options.EXCLUSIVE if given.get(word))
    exclusive = [*given_of, *(s for s in job_options.PARENT_WORDS if given.get(s))]
    if len(exclusive) > 1:
        together = ", ".join(exclusive)
        raise InvalidJob(f"The following options cannot be used together: {together}")
    jitter = given["backoff"].get("jitter") if isinstance(given.get("backoff"), Mapping) else None
    if jitter is not None and not (_is_number(jitter) and 0 <= jitter <= 1):
        raise InvalidJob(f"backoff jitter {jitter!r}: a number from 0 to 1")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(job: NewJob) -> None:
    check_job(job)
    if job.ttl_ms is not None:
        raise InvalidJob("BullMQ jobs have no time to live; removeOnComplete bounds finished ones")
    if not 0 <= job.priority <= job_options.PRIORITY_MAX:
        raise InvalidJob(f"priority {job.priority}: 0 to {job_options.PRIORITY_MAX}, 0 comes first")
    if job.job_id:
        check_id(job.job_id)


def _parent(given: Mapping[str, Any]) -> tuple[str, bytes | str]:
    parent = given.get("parent")
    if not parent:
        return "", ""
    told: dict[str, Any] = {"id": parent["id"], "queueKey": parent["queue"]}
    for long, short in job_options.SHORT.items():
        if short in job_options.PARENT_WORDS and (given.get(long) or given.get(short)):
            told[short] = True
    return f"{parent['queue']}:{parent['id']}", msgspec.json.encode(told)


def _dedup(given: Mapping[str, Any]) -> tuple[str, int, str]:
    told = given.get("deduplication") or given.get("de")
    if not isinstance(told, Mapping):
        return "", 0, ""
    words = (
        *(("e", "extend"), ("r", "replace"), ("k", "keepLastIfActive")),
        ("s", "reschedule"),
    )
    mode = "".join(letter for letter, word in words if told.get(word))
    return str(told.get("id") or ""), int(told.get("ttl") or 0), mode
