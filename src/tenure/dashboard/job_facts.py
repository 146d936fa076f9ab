"""A job in words and values for its page."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any
from urllib.parse import quote

import msgspec

from tenure.core.job import JobRecord
from tenure.dashboard.reading import decoded

_PRETTY_MAX = 1 << 20
_NOT_SHAPE = bytes(byte for byte in range(256) if byte not in b"[]{},")
_STEPS = bytes.maketrans(b"[{]},", b"\x01\x01\xff\xff\x00")
_TRACE_ID = re.compile(r"[0-9a-f]{32}")


def job_path(queue: str, job_id: str) -> str:
    """Where the page of a job is."""
    return f"/jobs/{quote(queue, safe=':')}/{quote(job_id, safe='')}"


def pretty(value: Any) -> str:
    """JSON for people: indented, letters as they are, large integers exact.

    Where the spaces would make it very long it is not indented, and it is cut off.
    """
    raw = msgspec.json.encode(value, enc_hook=str)
    if len(raw) + _spaces(raw) <= _PRETTY_MAX:
        raw = msgspec.json.format(raw, indent=2)
    text = raw.decode()
    return text if len(text) <= _PRETTY_MAX else f"{text[:_PRETTY_MAX]}…"


def _spaces(raw: bytes) -> int:
    """How many bytes the indentation of JSON takes, counted from what is outside of its strings."""
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    steps = b"".join(bare).translate(_STEPS, _NOT_SHAPE)
    return len(steps) + 2 * sum(accumulate(memoryview(steps).cast("b")))


def brief_of(data: Any) -> str:
    """Data of an event in one line, cut off where it gets long."""
    text = "" if data in (None, {}, "") else msgspec.json.encode(data, enc_hook=str).decode()
    return text if len(text) <= 400 else f"{text[:400]}…"


def progress_of(job: JobRecord) -> float | None:
    """A number from 0 to 100, if that is what the job reports."""
    value = decoded(job.progress)
    if isinstance(value, dict):
        value = value.get("percent", value.get("progress"))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return min(100.0, max(0.0, float(value)))


def facts_of(job: JobRecord) -> list[tuple[str, str]]:
    """What there is to say of a job beside its state; nothing that is empty."""
    facts = [
        ("Contract", job.contract),
        (
            "Attempt",
            f"{job.attempt} of {job.max_attempts}" if job.max_attempts else f"{job.attempt}",
        ),
        ("Fence", str(job.fence or "")),
        ("Worker", job.worker_id),
        ("Group", job.gid),
        ("Priority", str(job.priority or "")),
        ("Requester", job.requester),
    ]
    facts += [
        (name.replace("_", " ").capitalize(), str(value)) for name, value in job.extra.items()
    ]
    return [(name, value) for name, value in facts if value not in ("", "False", "None", "0")]


def trace_link(trace_url: str, trace: str) -> tuple[str, str]:
    """The trace id of a W3C traceparent, and where it is shown if we were told a place.

    Other programs write this field too: what is no id would change the path of the link.
    """
    parts = trace.split("-")
    if len(parts) < 4 or not _TRACE_ID.fullmatch(parts[1]):
        return "", ""
    return parts[1], trace_url.replace("{trace_id}", parts[1]) if trace_url else ""
