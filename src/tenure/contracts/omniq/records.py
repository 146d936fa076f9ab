"""A job's hash as the ledger shows it, and the job's own events."""

from __future__ import annotations

from typing import Any

import msgspec

from tenure.contracts.omniq.options import CONTRACT
from tenure.core.errors import ServerError
from tenure.core.job import JobEvent, JobRecord

_NUMBER_MAX = 2**53
STATES = ("wait", "delayed", "active", "completed", "failed")


def fields_of(flat: Any) -> dict[str, bytes]:
    """A flat HGETALL reply by field name."""
    flat = flat or []
    return {
        name.decode(errors="replace"): value
        for name, value in zip(flat[::2], flat[1::2], strict=True)
    }


def readable(replies: list[Any]) -> list[Any]:
    """Replies of a pipeline, None for a key of a wrong type: a worker will set it aside."""
    told: list[Any] = []
    for reply in replies:
        if isinstance(reply, ServerError):
            if "WRONGTYPE" not in str(reply):
                raise reply
            told.append(None)
        else:
            told.append(reply)
    return told


def number(raw: bytes | None) -> int:
    """A number that another program may have written carelessly (`1e+15`); 0 for none."""
    try:
        found = float(raw) if raw else 0.0
    except ValueError:
        return 0
    return int(found) if abs(found) < _NUMBER_MAX else 0


def record_of(job_id: str, fields: dict[str, bytes], queue: str, task: str) -> JobRecord:
    """The stored job; `task` is what a job that names none is called."""

    def text(name: str) -> str:
        return fields.get(name, b"").decode(errors="replace")

    ours = text("tn").split(" ")
    if len(ours) != 8:
        ours = ["0", "0", "", "0", "-", "-", "-", "0"]
    attempt, state = number(fields.get("attempt")), text("state")
    return JobRecord(
        job_id=job_id,
        contract=CONTRACT,
        queue=queue,
        task=text("task") or task,
        state=state,
        payload=fields.get("payload", b"null"),
        result=_result(fields, state),
        error=_error(fields) if attempt or state == "failed" else b"",
        attempt=attempt,
        max_attempts=number(fields.get("max_attempts")),
        fence=number(ours[1].encode()),
        created_ms=number(fields.get("created_ms")),
        updated_ms=number(fields.get("updated_ms")),
        due_ms=number(fields.get("due_ms")),
        lease_until_ms=number(fields.get("lock_until_ms")),
        gid=text("gid"),
        worker_id="" if ours[4] == "-" else ours[4],
        requester=text("requester"),
        progress=fields.get("progress", b""),
        trace=text("trace"),
        extra={
            "timeout_ms": number(fields.get("timeout_ms")),
            "backoff_ms": number(fields.get("backoff_ms")),
            "cancel_requested": fields.get("cancel") == b"1",
        },
    )


def _result(fields: dict[str, bytes], state: str) -> bytes:
    return fields.get("result", b"null" if state == "completed" else b"")


def _error(fields: dict[str, bytes]) -> bytes:
    """Our own JSON of the last error, or, where another client failed the job since, its words."""
    said = fields.get("last_error", b"")
    if not said:
        return b""
    ours = fields.get("error", b"")
    if ours and fields.get("error_ms") == fields.get("last_error_ms"):
        return ours
    return msgspec.json.encode({"code": "error", "message": said.decode(errors="replace")})


def events_of(fields: dict[str, bytes], last: Any) -> list[JobEvent]:
    """The job's first event and, once it has completed, its last: its hash tells both.

    `last` is the last entry of its stream, which holds what was between them. A job that just runs
    and completes has no stream.
    """
    created = number(fields.get("created_ms"))
    events = [JobEvent(event_id=f"{max(0, created - 1)}-0", type="wait", ts_ms=created)]
    if fields.get("state") == b"completed":
        ended = number(fields.get("completed_ms"))
        before = [*events, *entries_of(last)]
        last_ms, last_seq = position(before[-1].event_id)
        at = max((ended, 0), (last_ms, last_seq + 1))
        result = fields.get("result", b"null")
        data = b'{"result":%b}' % result if len(result) <= 4096 else b"{}"
        events.append(
            JobEvent(event_id=f"{at[0]}-{at[1]}", type="completed", ts_ms=ended, data=data)
        )
    return events


def entries_of(entries: Any) -> list[JobEvent]:
    """Entries of a job's stream as events."""
    return [_entry(*entry) for entry in entries or ()]


def position(event_id: str) -> tuple[int, int]:
    """An event id as something that sorts."""
    ms, _, seq = event_id.partition("-")
    return int(ms or 0), int(seq or 0)


def _entry(entry_id: bytes, flat: Any) -> JobEvent:
    fields = fields_of(flat)
    return JobEvent(
        event_id=entry_id.decode(),
        type=fields.get("type", b"").decode(errors="replace"),
        ts_ms=number(fields.get("ts")),
        step=fields.get("step", b"").decode(errors="replace"),
        data=fields.get("data", b"{}"),
    )
