"""Formats stored values for people: errors, durations, times, details of a job."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any
from urllib.parse import quote

import msgspec

from tenure.core.encoding import TIME_MS_MAX
from tenure.core.job import JobRecord

_CLASS_KEYS = ("code", "type", "class", "name", "error_code")
_MESSAGE_KEYS = ("message", "detail", "reason", "failedReason", "error")
_STACK_KEYS = ("stack", "traceback", "stacktrace")
_CLASS_CHARS_MAX = 80
_PRETTY_MAX = 1 << 20
_NOT_SHAPE = bytes(byte for byte in range(256) if byte not in b"[]{},")
_STEPS = bytes.maketrans(b"[{]},", b"\x01\x01\xff\xff\x00")
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))


class ErrorInfo(msgspec.Struct, frozen=True):
    """The error of a job: class, message and traceback."""

    name: str = ""
    message: str = ""
    stack: str = ""


def now_ms() -> int:
    """The wall clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def decode_json(raw: bytes) -> Any:
    """The decoded value, None for no bytes; bytes that are not JSON are returned as text."""
    if not raw:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw.decode(errors="replace")


def error_info(raw: bytes) -> ErrorInfo:
    """The error of a job; empty if it has none."""
    value = decode_json(raw)
    if value is None:
        return ErrorInfo()
    if not isinstance(value, dict):
        text = str(value)
        return ErrorInfo(_class_in(text), text)
    message = _first(value, _MESSAGE_KEYS)
    name = _first(value, _CLASS_KEYS)
    return ErrorInfo(name or _class_in(message), message, _first(value, _STACK_KEYS))


def error_class(raw: bytes) -> str:
    """The class of an error, by which dead letters are grouped.

    >>> error_class(b'{"code":"ValueError","message":"no"}'), error_class(b'"Timeout: 3 s"')
    ('ValueError', 'Timeout')
    """
    return error_info(raw).name


def _first(value: dict[str, Any], keys: tuple[str, ...]) -> str:
    for key in keys:
        found = value.get(key)
        if isinstance(found, list) and found:
            found = "\n".join(map(str, found))
        if found not in (None, "", []):
            return str(found)
    return ""


def _class_in(text: str) -> str:
    """The text before the first colon, its first line."""
    head = text.partition(":")[0].strip()
    return head.splitlines()[0][:_CLASS_CHARS_MAX] if head else ""


def duration(ms: float | None) -> str:
    """A duration in two or three digits.

    >>> [duration(ms) for ms in (0.4, 17, 1_540, 61_000, 5_400_000, 200_000_000, None)]
    ['<1 ms', '17 ms', '1.5 s', '1 min', '1.5 h', '2.3 d', '-']
    """
    if ms is None:
        return "-"
    if ms < 1:
        return "<1 ms" if ms > 0 else "0 ms"
    if ms < 1_000:
        return f"{ms:.0f} ms"
    for size, unit in _UNITS:
        if ms >= size:
            number = ms / size
            text = f"{number:.0f}" if number >= 10 else f"{number:.1f}".removesuffix(".0")
            return f"{text} {unit}"
    return f"{ms:.0f} ms"


def number(value: float) -> str:
    """A number with spaces between thousands; small rates with decimals.

    >>> number(1234567), number(0.25), number(12.0)
    ('1 234 567', '0.25', '12')
    """
    if value == int(value):
        return f"{int(value):,}".replace(",", " ")
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}".replace(",", " ")


def share(value: float) -> str:
    """A share as a percentage.

    >>> share(0.0), share(0.004), share(0.5)
    ('0 %', '0.4 %', '50 %')
    """
    percent = value * 100
    return f"{percent:.1f} %" if 0 < percent < 10 else f"{percent:.0f} %"


def moment(ts_ms: int) -> str:
    """Date and time in UTC; "-" for 0.

    >>> moment(9 * 10**14), moment(-(9 * 10**14))
    ('9999-12-31 23:59:59.999Z', '1970-01-01 00:00:00.000Z')
    """
    if not ts_ms:
        return "-"
    ts_ms = min(max(ts_ms, 0), TIME_MS_MAX)
    when = datetime.fromtimestamp(ts_ms // 1000, UTC)
    return when.strftime("%Y-%m-%d %H:%M:%S.") + f"{ts_ms % 1000:03d}Z"


def clock(ts_ms: int) -> str:
    """The time of day in UTC with milliseconds; "-" for 0."""
    return moment(ts_ms)[11:] if ts_ms else "-"


def ago(ts_ms: int, now_ms: int) -> str:
    """How long ago, or in how long."""
    if not ts_ms:
        return "-"
    delta = now_ms - ts_ms
    return f"in {duration(-delta)}" if delta < -999 else f"{duration(max(delta, 0))} ago"


def job_path(queue: str, job_id: str) -> str:
    """The path of the page of a job."""
    return f"/jobs/{quote(queue, safe=':')}/{quote(job_id, safe='')}"


def pretty(value: Any) -> str:
    """Indented JSON, without escaped letters and with exact large integers.

    If indentation would make it very long it is not indented, and it is cut off at 1 MiB.
    """
    raw = msgspec.json.encode(value, enc_hook=str)
    if len(raw) + _spaces(raw) <= _PRETTY_MAX:
        raw = msgspec.json.format(raw, indent=2)
    text = raw.decode()
    return text if len(text) <= _PRETTY_MAX else f"{text[:_PRETTY_MAX]}…"


def _spaces(raw: bytes) -> int:
    """How many bytes the indentation of JSON takes, counted without decoding it."""
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    steps = b"".join(bare).translate(_STEPS, _NOT_SHAPE)
    return len(steps) + 2 * sum(accumulate(memoryview(steps).cast("b")))


def brief_of(data: Any) -> str:
    """The data of an event in one line of at most 400 characters."""
    text = "" if data in (None, {}, "") else msgspec.json.encode(data, enc_hook=str).decode()
    return text if len(text) <= 400 else f"{text[:400]}…"


def progress_of(job: JobRecord) -> float | None:
    """The progress from 0 to 100, None if the job reports something else."""
    value = decode_json(job.progress)
    if isinstance(value, dict):
        value = value.get("percent", value.get("progress"))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return min(100.0, max(0.0, float(value)))


def facts_of(job: JobRecord) -> list[tuple[str, str]]:
    """The details of a job besides its state; empty ones are left out."""
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
    """The trace id of a W3C traceparent, and its link if `trace_url` is set.

    Other programs write this field too, so the id is checked before it becomes part of a link.
    """
    parts = trace.split("-")
    if len(parts) < 4 or not _TRACE_ID.fullmatch(parts[1]):
        return "", ""
    return parts[1], trace_url.replace("{trace_id}", parts[1]) if trace_url else ""
