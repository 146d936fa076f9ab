"""Leases as the claim script gives them out, and outcomes as the settle script takes them.

A lease carries the words of its job's hash field `lease` as they were when it was given out (see
`lua/include/job.lua`). Whoever settles gives them back: if they still stand there, letter for
letter, nobody has come between. They, the task and the time to live are the same for most jobs of a
claim: they are taken apart once here, and sent once a batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from leasehold.contracts.streams.options import QUEUE
from leasehold.core.idempotency import short_hash
from leasehold.core.lease import Lease
from leasehold.core.outcome import Failure, Outcome
from leasehold.core.retry import RetryPolicy, delay_ms
from leasehold.store.redis import Arg


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
            handle, created_ms, trace = _entry(entry.decode())
            leases.append(
                Lease(
                    job_id=job_id.decode(),
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
    """The rows of the settle script: the common completion in few parts, all others in full."""
    rows: list[Arg] = []
    shared: Alike | None = None
    hashed: tuple[bytes, str] = (b"", short_hash(b""))
    for outcome in outcomes:
        lease, kind = outcome.lease, outcome.kind
        if kind != "complete":
            rows += _in_full(outcome, "", backoff)
            continue
        if outcome.result != hashed[0]:
            hashed = (outcome.result, short_hash(outcome.result))
        given = lease.extra
        if not isinstance(given, Given) or not _is_of(given, lease):
            rows += _in_full(outcome, hashed[1], backoff)
            continue
        if given.alike is not shared:
            shared = given.alike
            rows += ("like", shared.words, shared.task, shared.ttl_s, shared.claimed_ms)
        rows += ("done", lease.job_id, given.handle, outcome.result, hashed[1])
    return rows


def _alike(words: bytes, task: bytes, ttl_s: bytes, now: int) -> Alike:
    fence, _, attempt, max_attempts, _, _, token = words.decode().split()
    name = task.decode()
    return Alike(words, task, ttl_s, now, name, int(fence), token, int(attempt), int(max_attempts))


def _entry(words: str) -> tuple[str, int, str]:
    """The id of the entry, when its job was created, and its trace; an id alone tells when."""
    if " " not in words:
        return words, int(words.partition("-")[0]), ""
    handle, created_ms, trace = words.split()
    return handle, int(created_ms), "" if trace == "-" else trace


def _is_of(given: Given, lease: Lease) -> bool:
    """A lease that contradicts what it was given with shall be looked at closely."""
    alike = given.alike
    return (alike.fence, alike.token, given.handle) == (lease.fence, lease.token, lease.handle)


def _in_full(outcome: Outcome, result_h: str, backoff: RetryPolicy) -> tuple[Arg, ...]:
    lease, kind, wait_ms = outcome.lease, outcome.kind, outcome.delay_ms
    failure = outcome.failure
    body = outcome.result
    if kind == "fail":  # the job's own attempts decide; the delay is the contract's default
        wait_ms = delay_ms(backoff, lease.attempt, secrets.randbelow(1000) / 1000)
    if kind == "complete":
        wait_ms = 0
    else:
        body = msgspec.json.encode(failure) if failure else b""
    proof = (lease.job_id, lease.handle, lease.fence, lease.token)
    return ("end", *proof, kind, lease.task, body, result_h, _code(failure), wait_ms)


def _code(failure: Failure | None) -> str:
    """The error code as the journal takes it: one short word without separators."""
    return "" if failure is None else "".join(failure.code.split())[:80]
