"""A job's hash as the ledger shows it."""

from __future__ import annotations

from typing import Any

import msgspec

from tenure.contracts.bullmq import job_options
from tenure.contracts.bullmq.options import CONTRACT
from tenure.core.job import JobRecord

_EXACT_MAX = 2**53


def record_of(
    job_id: str, queue: str, state: str, raw: dict[bytes, bytes], *, due_ms: int = 0
) -> JobRecord:
    """The record of a job whose place in the queue is known."""

    def text(name: bytes) -> str:
        return raw.get(name, b"").decode(errors="replace")

    def count(name: bytes) -> int:
        return number(raw.get(name, b""))

    options = job_options.read(raw.get(b"opts", b"{}"))
    made, stalled = count(b"atm"), count(b"stc")
    created = count(b"timestamp")
    words = text(b"tn").split(" ")
    lease_until = number(words[2].encode()) if len(words) == 6 else 0
    return JobRecord(
        job_id=job_id,
        contract=CONTRACT,
        queue=queue,
        task=text(b"name"),
        state=state,
        payload=raw.get(b"data", b"null"),
        result=raw.get(b"returnvalue", b""),
        error=_error(raw),
        attempt=made + stalled + (state == "active"),
        max_attempts=options.attempts + stalled if options.attempts else 0,
        fence=count(b"ats"),
        created_ms=created,
        updated_ms=count(b"finishedOn") or count(b"processedOn") or created,
        due_ms=due_ms,
        lease_until_ms=lease_until if state == "active" else 0,
        priority=count(b"priority"),
        worker_id=text(b"workerId") or text(b"pb"),
        progress=raw.get(b"progress", b""),
        trace=options.trace,
        extra=_extra(raw, made, stalled),
    )


def number(raw: bytes | int) -> int:
    """A number that another program may have written carelessly."""
    try:
        value = int(float(raw)) if raw else 0
    except (ValueError, OverflowError):
        return 0
    return value if abs(value) <= _EXACT_MAX else 0


def _error(raw: dict[bytes, bytes]) -> bytes:
    """What BullMQ keeps of a failure, as JSON: the reason, and the stack of the last attempt."""
    reason = raw.get(b"failedReason")
    if reason is None:
        return b""
    try:
        stacks = msgspec.json.decode(raw.get(b"stacktrace", b"[]"))
    except (msgspec.DecodeError, RecursionError):
        stacks = []
    stack = stacks[-1] if isinstance(stacks, list) and stacks else ""
    shown = {"message": reason.decode(errors="replace"), "stack": stack, "code": _code(str(stack))}
    return msgspec.json.encode(shown)


def _code(stack: str) -> str:
    """The error's name: the first word of a Node stack, the last line's of a Python one."""
    lines = [line for line in stack.strip().splitlines() if line]
    if not lines:
        return ""
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return line.partition(":")[0].strip()[:80]


def _extra(raw: dict[bytes, bytes], made: int, stalled: int) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "attemptsMade": made,  # B-2: BullMQ's own name for it, read from `atm`
        "stalledCounter": stalled,
        "cancel_requested": raw.get(b"cancel") == b"1",
    }
    for field in (b"parentKey", b"rjk", b"deid", b"defa"):
        if field in raw:
            extra[field.decode()] = raw[field].decode(errors="replace")
    return extra
