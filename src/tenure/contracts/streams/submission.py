"""A new job as the submit script takes it, and its answer."""

from __future__ import annotations

import re
from typing import Any

from tenure.contracts.streams.options import Options
from tenure.core.errors import InvalidJob
from tenure.core.job import (
    NewJob,
    Submitted,
    check_job,
    check_trace,
    new_job_id,
    request_hash,
    scoped_key,
    short_hash,
    submitted,
)
from tenure.store.redis import Arg

ARGS = 11
"""How many arguments of the script are one job's."""

_JOB_ID = re.compile(r"[A-Za-z0-9_.@-]{1,128}")


def submit_args(job: NewJob, options: Options) -> tuple[Arg, ...]:
    """The arguments of one job, in the order of submit-9.lua; raises `InvalidJob`."""
    _check(job)
    job_id = job.job_id or new_job_id()
    ttl_s = max(1, -(-job.ttl_ms // 1000)) if job.ttl_ms else options.ttl_s
    key = scoped_key(job.requester, job.idempotency_key) if job.idempotency_key else ""
    payload_h = short_hash(job.payload)
    same = request_hash(job.task, payload_h, job.requester, job.ttl_ms, job.max_attempts)
    return (
        job_id,
        job.task,
        job.payload,
        ttl_s,
        job.max_attempts or 0,
        key,
        same,
        job.requester,
        job.delay_ms,
        job.trace or "-",
        payload_h,
    )


def answer(reply: list[Any], options: Options) -> Submitted:
    """The seam's answer for the script's: status, id and, for a job just created, its time."""
    status, job_id, *created_ms = reply
    return submitted(status.decode(), job_id.decode(), *created_ms, depth_max=options.max_depth)


def _check(job: NewJob) -> None:
    if job.job_id and not _JOB_ID.fullmatch(job.job_id):
        raise InvalidJob(f"job id {job.job_id[:140]!r}: 1 to 128 of letters, digits and _ . @ -")
    check_job(job)
    check_trace(job.trace)
    if job.ttl_ms is not None and job.ttl_ms < 1:
        raise InvalidJob(f"ttl_ms is at least 1, not {job.ttl_ms}")
    if job.priority or job.gid:
        raise InvalidJob("this contract has neither priorities nor groups; leave them out")
    if job.options:
        names = ", ".join(sorted(job.options))
        raise InvalidJob(f"this contract has no job options; these were given: {names}")
