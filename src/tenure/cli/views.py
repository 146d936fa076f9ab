"""How jobs, events and counts look to a person and to a program."""

from __future__ import annotations

from typing import Any

import msgspec

from tenure.cli.output import ago, paint, paint_state
from tenure.core.encoding import one_line, shown_json
from tenure.core.job import JobEvent, JobRecord
from tenure.core.registry import parse_url
from tenure.core.state import MACHINES

_SUCCESS = frozenset({"done", "completed", "succeeded"})
_FINAL = frozenset(state.lower() for machine in MACHINES.values() for state in machine.final)
_JSON_FIELDS = ("payload", "result", "error", "progress")


def is_final(state: str, contract: str = "") -> bool:
    """Whether a job in this state has ended, by its contract or else by any.

    >>> is_final("failed"), is_final("failed", "inbox"), is_final("dead_letter", "inbox")
    (True, False, True)
    """
    machine = MACHINES.get(contract)
    return state in machine.final if machine else state.lower() in _FINAL


def is_success(state: str) -> bool:
    """Whether it ended well."""
    return state.lower() in _SUCCESS


def job_object(record: JobRecord) -> dict[str, Any]:
    """The job for a program: JSON fields as values, None where there is nothing."""
    view: dict[str, Any] = msgspec.to_builtins(record, builtin_types=(bytes,))
    for field in _JSON_FIELDS:
        view[field] = plain_json(view[field])
    return view


def event_object(event: JobEvent) -> dict[str, Any]:
    """The event for a program."""
    return {
        "id": event.event_id,
        "type": event.type,
        "ts_ms": event.ts_ms,
        "step": event.step,
        "data": plain_json(event.data),
    }


def event_line(event: JobEvent) -> str:
    """The event for a person: when, what, where in the work, and its data if there is any."""
    when = f"{event.ts_ms // 1000 % 86_400 // 3600:02d}:{event.ts_ms // 60_000 % 60:02d}:"
    when += f"{event.ts_ms // 1000 % 60:02d}.{event.ts_ms % 1000:03d}"
    data = "" if event.data in (b"", b"{}", b"null") else event.data.decode(errors="replace")
    words = [paint(when, "dim"), paint_state(event.type).ljust(10), event.step, data]
    return "  ".join(one_line(word) for word in words if word)


def job_row(job: dict[str, Any]) -> list[str]:
    """The job as a line of `ls`."""
    error = job.get("error")
    message = error.get("message", "") if isinstance(error, dict) else ""
    return [
        job["job_id"],
        job["task"],
        paint_state(job["state"]),
        str(job.get("attempt") or "-"),
        ago(job.get("updated_ms") or job.get("created_ms") or 0),
        message[:60],
    ]


def plain_json(raw: bytes) -> Any:
    """What the bytes say; as the contract has it, `_raw` where they are no JSON."""
    return shown_json(raw) if raw else None


def error_text(error: Any) -> str:
    """The words of a stored error, whatever its shape."""
    if isinstance(error, dict):
        for key in ("message", "detail", "reason"):
            if error.get(key):
                return str(error[key])
    return "" if error is None else str(error)


def safe_url(url: str) -> str:
    """A queue or store URL without its password."""
    return parse_url(url).safe if "://" in url else url
