"""Leases as the claim script gives them out, and outcomes as the settle script takes them.

A lease carries the words of its job's hash field `lease` as they were when it was given out (see
`lua/include/job.lua`). Whoever settles gives them back: if they still stand there, letter for
letter, nobody has come between. They, the task and the time to live are the same for most jobs of a
claim: they are taken apart once here, and sent once a batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from tenure.contracts.streams.options import QUEUE
from tenure.core.job import short_hash
from tenure.core.lease import Lease
from tenure.core.outcome import Failure, Outcome
from tenure.core.retry import RetryPolicy, delay_ms
from tenure.store.redis import Arg


class Alike(NamedTuple):
    """What leases of one claim have in common; `words`: those of the lease."""

    words: bytes
    task: bytes
    ttl_s: bytes
    claimed_ms: int
    task_name: str
    fence: int
    token: str
    attempt: int
    max_attempts: int


class Given(NamedTuple):
    """What a lease was given out with."""

    alike: Alike
    handle: str


def leases_of(groups: list[Any], *, token: str, now: int, lease_ms: int) -> list[Lease]:
    """The leases in the answer of a claim."""
    leases = []
    for task, words, ttl_s, rows in groups:
        alike = _alike(words, task, ttl_s, now)
        parts = iter(rows)
        for job_id, payload, entry in zip(parts, parts, parts, strict=True):
            handle, created_ms, trace = _entry(entry.decode(), now)
            leases.append(
                Lease(
                    job_id=job_id.decode(errors="replace"),
                    queue=QUEUE,
                    task=alike.task_name,
                    payload=payload,
                    attempt=alike.attempt,
                    max_attempts=alike.max_attempts,
                    fence=alike.fence,
                    token=token,
                    lease_until_ms=now + lease_ms,
                    lease_ms=lease_ms,
                    created_ms=created_ms,
                    handle=handle,
                    trace=trace,
                    extra=Given(alike, handle),
                )
            )
    return leases


def settle_rows(outcomes: Iterable[Outcome], backoff: RetryPolicy) -> list[Arg]:
    """The rows of the settle script: the common completion in few parts, all others in full.

    What completions one after the other have in common, mostly also the result, is sent once.
    """
    rows: list[Arg] = []
    shared: Alike | None = None
    for (alike, result), run in groupby(outcomes, _in_common):
        if alike is None:
            for outcome in run:
                rows += _in_full(outcome, backoff)
            continue
        if alike is not shared:
            shared = alike
            rows += ("like", alike.words, alike.task, alike.ttl_s, alike.claimed_ms)
        jobs = [part for each in run for part in (each.lease.job_id, each.lease.handle)]
        rows += ("done", result, short_hash(result), len(jobs) // 2, *jobs)
    return rows


def _in_common(outcome: Outcome) -> tuple[Alike | None, bytes]:
    """What a completion may share with the one before it; no `Alike` for what is sent in full."""
    lease = outcome.lease
    given = lease.extra
    if (
        outcome.kind != "complete"
        or not isinstance(given, Given)
        or not _is_of(given, lease)
        or "\t" in lease.job_id  # another program's; the journal joins ids by tabs
    ):
        return None, b""
    return given.alike, outcome.result


def _alike(words: bytes, task: bytes, ttl_s: bytes, now: int) -> Alike:
    fence, _, attempt, max_attempts, _, _, token = words.decode().split()
    name = task.decode(errors="replace")  # a foreign gateway's may be anything
    return Alike(words, task, ttl_s, now, name, int(fence), token, int(attempt), int(max_attempts))


def _entry(words: str, now: int) -> tuple[str, int, str]:
    """The id of the entry, when its job was created, and its trace; an id alone tells when."""
    if " " not in words:
        return words, min(now, int(words.partition("-")[0])), ""
    handle, created_ms, trace = words.split()
    return handle, min(now, int(created_ms)), "" if trace == "-" else trace


def _is_of(given: Given, lease: Lease) -> bool:
    """A lease that contradicts what it was given with shall be looked at closely."""
    alike = given.alike
    return (alike.fence, alike.token, given.handle) == (lease.fence, lease.token, lease.handle)


def _in_full(outcome: Outcome, backoff: RetryPolicy) -> tuple[Arg, ...]:
    lease, kind, wait_ms = outcome.lease, outcome.kind, outcome.delay_ms
    failure = outcome.failure
    body, result_h = outcome.result, ""
    if kind == "fail":  # the job's own attempts decide; the delay is the contract's default
        wait_ms = delay_ms(backoff, lease.attempt, secrets.randbelow(1000) / 1000)
    if kind == "complete":
        wait_ms, result_h = 0, short_hash(body)
    else:
        body = msgspec.json.encode(failure) if failure else b""
    proof = (lease.job_id, lease.handle, lease.fence, lease.token)
    return ("end", *proof, kind, lease.task, body, result_h, _code(failure), wait_ms)


def _code(failure: Failure | None) -> str:
    """The error code as the journal takes it: one short word without separators."""
    return "" if failure is None else "".join(failure.code.split())[:80]
