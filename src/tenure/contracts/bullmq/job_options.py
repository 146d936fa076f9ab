"""A job's options as BullMQ stores them: JSON in the field `opts`, some names shortened.

`pack` makes that JSON from the names Node users know; `read` is what a worker needs of it. Options
repeat from job to job, so what was read is kept by the bytes it was read from.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import msgspec

from tenure.core.errors import InvalidJob

PRIORITY_MAX = 2_097_151
_CACHE_MAX = 1_000

# Long names users write, short names Redis holds.
SHORT = {
    "failParentOnFailure": "fpof",
    "continueParentOnFailure": "cpof",
    "ignoreDependencyOnFailure": "idof",
    "removeDependencyOnFailure": "rdof",
    "keepLogs": "kl",
    "deduplication": "de",
    "telemetryMetadata": "tm",
    "omitContext": "omc",
}
_LONG = {short: long for long, short in SHORT.items()}
# Of these a job has one at most.
EXCLUSIVE = (
    *("removeDependencyOnFailure", "failParentOnFailure"),
    *("continueParentOnFailure", "ignoreDependencyOnFailure"),
)
# As Python users write them.
SPELLED = {
    "job_id": "jobId",
    "remove_on_complete": "removeOnComplete",
    "remove_on_fail": "removeOnFail",
    "stack_trace_limit": "stackTraceLimit",
    "size_limit": "sizeLimit",
    "keep_logs": "keepLogs",
    "fail_parent_on_failure": "failParentOnFailure",
    "continue_parent_on_failure": "continueParentOnFailure",
    "ignore_dependency_on_failure": "ignoreDependencyOnFailure",
    "remove_dependency_on_failure": "removeDependencyOnFailure",
}
KNOWN = frozenset(
    {
        *SHORT,
        *SHORT.values(),
        *("jobId", "attempts", "backoff", "delay", "lifo", "parent", "priority", "repeat"),
        *("removeOnComplete", "removeOnFail", "sizeLimit", "stackTraceLimit", "timestamp"),
        *("repeatJobKey", "prevMillis", "count", "telemetry"),
    }
)
PARENT_WORDS = ("fpof", "cpof", "idof", "rdof")


class Keep(msgspec.Struct, frozen=True):
    """How many finished jobs to keep: None means no bound, a count of 0 removes the job itself.

    `limit` bounds how many that are too old one settle removes.
    """

    count: int | None = None
    age_s: int | None = None
    limit: int | None = None


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs of a job's options."""

    attempts: int = 0
    backoff: Any = None
    lifo: bool = False
    keep_completed: Keep | None = None
    keep_failed: Keep | None = None
    stack_trace_limit: int | None = None
    keep_logs: int | None = None
    trace: str = ""

    @property
    def keeps(self) -> bool:
        """Whether the job's own options bound what is kept of completed jobs."""
        return self.keep_completed is not None and self.keep_completed != Keep()


def spelled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under BullMQ's long names, whichever way they were written; unknown ones raise."""
    out: dict[str, Any] = {}
    for name, value in options.items():
        long = SPELLED.get(name, name)
        if long not in KNOWN:
            raise InvalidJob(
                f"{name!r} is no BullMQ job option; there are: {', '.join(sorted(KNOWN))}"
            )
        if value is not None:
            out[long] = value
    if isinstance(out.get("backoff"), int | float):
        out["backoff"] = {"type": "fixed", "delay": out["backoff"]}
    telemetry = out.pop("telemetry", None)
    if isinstance(telemetry, Mapping):
        if telemetry.get("metadata"):
            out["telemetryMetadata"] = telemetry["metadata"]
        if telemetry.get("omitContext"):
            out["omitContext"] = True
    return out


def pack(options: Mapping[str, Any]) -> bytes:
    """The JSON of `opts`, from options under their long names."""
    packed = {SHORT.get(name, name): value for name, value in options.items()}
    packed.setdefault("attempts", 0)
    return msgspec.json.encode(packed)


def unpack(raw: bytes) -> dict[str, Any]:
    """All options under their long names, from the JSON of `opts`.

    >>> unpack(b'{"attempts":3,"fpof":true}')
    {'attempts': 3, 'failParentOnFailure': True}
    """
    try:
        told = msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
    options = {_LONG.get(name, name): value for name, value in told.items()}
    telemetry = {"metadata": options.pop("telemetryMetadata", None)}
    telemetry["omitContext"] = options.pop("omitContext", None)
    if any(value is not None for value in telemetry.values()):
        options["telemetry"] = {k: v for k, v in telemetry.items() if v is not None}
    return options


def read(raw: bytes) -> JobOptions:
    """What a worker needs of `opts`. JSON that no client would have written reads as none."""
    found = _seen.get(raw)
    if found is None:
        found = _read(raw)
        if len(_seen) >= _CACHE_MAX:
            _seen.clear()
        _seen[raw] = found
    return found


_seen: dict[bytes, JobOptions] = {}


def _read(raw: bytes) -> JobOptions:
    try:
        told = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        told = None
    if not isinstance(told, dict):
        return JobOptions()
    return JobOptions(
        attempts=_whole(told.get("attempts")) or 0,
        backoff=told.get("backoff"),
        lifo=told.get("lifo") is True,
        keep_completed=keep_of(told.get("removeOnComplete")),
        keep_failed=keep_of(told.get("removeOnFail")),
        stack_trace_limit=_whole(told.get("stackTraceLimit")),
        keep_logs=_whole(told.get("kl")),
        trace=_trace(told.get("tm")),
    )


def keep_of(told: Any) -> Keep | None:
    """`removeOnComplete` and `removeOnFail` in their four forms; None where nothing is said."""
    if told is True:
        return Keep(count=0)
    if isinstance(told, bool) or told is None:
        return None if told is None else Keep()
    if isinstance(told, int | float):
        return Keep(count=_whole(told)) if told >= 0 else Keep()
    if isinstance(told, dict):
        count, age, limit = (_whole(told.get(word)) for word in ("count", "age", "limit"))
        return Keep(count, age, limit)
    return None


def backoff_ms(backoff: Any, attempts_made: int, chance: float | None = None) -> int:
    """How long to wait before the next attempt, `attempts_made` of them having failed.

    >>> backoff_ms({"type": "exponential", "delay": 1000}, 3)
    4000
    >>> backoff_ms(500, 3), backoff_ms({"type": "fixed", "delay": 200, "jitter": 0.5}, 1, 0.5)
    (500, 150)
    """
    if isinstance(backoff, int | float) and not isinstance(backoff, bool):
        return max(0, round(backoff))
    if not isinstance(backoff, dict):
        return 0
    delay, jitter = _real(backoff.get("delay")), _real(backoff.get("jitter"))
    if backoff.get("type") == "exponential":
        delay = min(2 ** min(attempts_made - 1, 52) * delay, 2**52)
    if jitter:
        chance = random.random() if chance is None else chance
        least = delay * (1 - jitter)
        delay = int(chance * delay * jitter + least)
    return max(0, round(delay))


def stack_of(earlier: bytes, entry: str, limit: int | None) -> bytes:
    """The JSON array `stacktrace` with one more entry, cut to the job's limit."""
    try:
        stack = msgspec.json.decode(earlier) if earlier else []
    except (msgspec.DecodeError, RecursionError):
        stack = []
    stack = [*stack, entry] if isinstance(stack, list) else [entry]
    if limit is not None:
        stack = stack[-limit:] if limit > 0 else []
    # Lua's cjson and JavaScript take raw UTF-8; lone surrogates would not encode.
    return json.dumps(stack, ensure_ascii=False).encode(errors="replace")


def _real(value: Any) -> float:
    return value if isinstance(value, int | float) else 0


def _whole(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if abs(value) < 2**53 else None


def _trace(told: Any) -> str:
    """The W3C traceparent in `tm`, which is a JSON object of headers or the header itself."""
    if not isinstance(told, str):
        return ""
    if told.startswith("{"):
        try:
            carrier = msgspec.json.decode(told)
        except (msgspec.DecodeError, RecursionError):
            return ""
        value = carrier.get("traceparent") if isinstance(carrier, dict) else None
        return value if isinstance(value, str) else ""
    return told
