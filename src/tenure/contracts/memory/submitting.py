"""Whether a job may be stored: valid, not a repetition, no conflict, room left (M-2 to M-6)."""

from __future__ import annotations

import msgspec

from tenure.contracts.memory.contents import Contents
from tenure.contracts.memory.stored import StoredJob
from tenure.core.errors import UsageError
from tenure.core.idempotency import request_hash, scoped_key
from tenure.core.job import NewJob, Submitted

FULL_RETRY_AFTER_MS = 1_000


def admit(contents: Contents, new: NewJob) -> StoredJob | Submitted:
    """The job to be stored, or the answer that nothing is to be written. Changes nothing."""
    problem = invalid(new)
    if problem:
        return Submitted("", "invalid", problem)
    key = scoped_key(new.requester, new.idempotency_key) if new.idempotency_key else ""
    request_h = _request_hash(new)
    known = contents.jobs.get(new.job_id) or contents.jobs.get(contents.keys.get(key, ""))
    if known is not None:
        return _repeated(known, new, request_h)
    if contents.options.depth_max and contents.depth >= contents.options.depth_max:
        why = f"the queue holds {contents.depth} unfinished jobs, its limit"
        return Submitted("", "full", why, FULL_RETRY_AFTER_MS)
    return _stored(contents, new, request_h, key)


def invalid(new: NewJob) -> str:
    """Why no store could take this job; "" when it can."""
    if not new.task:
        return "a job needs a task name"
    if new.delay_ms < 0 or (new.ttl_ms is not None and new.ttl_ms <= 0):
        return "delay_ms cannot be negative and ttl_ms is positive or left out"
    if new.max_attempts is not None and new.max_attempts < 1:
        return f"max_attempts counts starts and is at least 1, not {new.max_attempts}"
    try:
        msgspec.json.decode(new.payload)
        if new.idempotency_key:
            scoped_key(new.requester, new.idempotency_key)
    except msgspec.DecodeError as error:
        return f"the payload is not JSON: {error}"
    except UsageError as error:
        return str(error)
    return ""


def _request_hash(new: NewJob) -> str:
    """What makes two submits the same: everything but the ids and the trace."""
    return request_hash(
        new.requester,
        new.task,
        msgspec.json.decode(new.payload),
        new.priority,
        new.delay_ms,
        new.max_attempts,
        new.ttl_ms,
        new.gid,
        new.options,
    )


def _repeated(known: StoredJob, new: NewJob, request_h: str) -> Submitted:
    if known.request_h == request_h:
        return Submitted(known.job_id, "replayed")
    named = "job id" if known.job_id == new.job_id else "idempotency key"
    return Submitted("", "conflict", f"this {named} belongs to another request")


def _stored(contents: Contents, new: NewJob, request_h: str, key: str) -> StoredJob:
    now_ms = contents.now_ms()
    return StoredJob(
        job_id=new.job_id or f"{contents.random.getrandbits(128):032x}",
        queue=contents.name,
        task=new.task,
        payload=new.payload,
        request_h=request_h,
        created_ms=now_ms,
        max_attempts=new.max_attempts or contents.options.max_attempts,
        requester=new.requester,
        key=key,
        priority=new.priority,
        gid=new.gid,
        trace=new.trace,
        ttl_ms=new.ttl_ms or 0,
        retry_delay_ms=int(new.options.get("retry_delay_ms", contents.options.retry_delay_ms)),
        due_ms=now_ms + new.delay_ms if new.delay_ms else 0,
    )
