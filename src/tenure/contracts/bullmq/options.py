"""The options of a `bullmq+redis://` URL, the keys of its queue, and the options of a job."""

from __future__ import annotations

import base64
import functools
import json
import random
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from tenure.core.errors import InvalidJob, UsageError
from tenure.core.registry import check_least

CONTRACT = "bullmq"
URL_EXAMPLE = "bullmq+redis://host:6379/0?queue=name"

_STACKS_MAX = 100


class Keys(NamedTuple):
    """The sixteen keys of every script, in the order of KEYS."""

    wait: str
    active: str
    prioritized: str
    delayed: str
    paused: str
    meta: str
    events: str
    marker: str
    stalled: str
    limiter: str
    priority_counter: str
    completed: str
    failed: str
    waiting_children: str
    id: str
    journal: str


_KEY_NAMES = Keys(
    *("wait", "active", "prioritized", "delayed", "paused", "meta", "events", "marker"),
    *("stalled", "limiter", "pc", "completed", "failed", "waiting-children", "id"),
    "tenure:journal",
)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the queue URL; the defaults are those of a BullMQ worker.

    `lease_ms` is BullMQ's lockDuration, `stalled_max` its maxStalledCount (how often the lease of
    one job may run out before the job fails), `stalled_ms` its stalledInterval. `limit_max` jobs
    per `limit_ms` is the worker's rate limiter, `metrics_minutes` its metrics.maxDataPoints.
    `keep_completed` and `keep_failed` say how many finished jobs are kept if a job's options do not
    (-1: all), `keep_completed_s` and `keep_failed_s` for how long (0: for ever). `max_depth` limits
    unfinished jobs (0: no limit).
    """

    queue: str = "jobs"
    prefix: str = "bull"
    name: str = ""
    lease_ms: int = 30_000
    stalled_max: int = 1
    stalled_ms: int = 30_000
    limit_max: int = 0
    limit_ms: int = 0
    metrics_minutes: int = 0
    keep_completed: int = -1
    keep_failed: int = -1
    keep_completed_s: int = 0
    keep_failed_s: int = 0
    max_attempts: int = 0
    max_depth: int = 0
    idempotency_ttl_s: int = 86_400
    journal_bytes: int = 32_000_000
    journal_days: float = 7.0
    unread_days: float = 30.0

    def __post_init__(self) -> None:
        check_least(self, CONTRACT, lease_ms=50, stalled_max=0, stalled_ms=50)
        if not self.queue or ":" in self.queue:
            raise UsageError(
                f"queue {self.queue!r}: a BullMQ queue has a name, and no colon in it",
                contract=CONTRACT,
            )
        if bool(self.limit_max) != bool(self.limit_ms):
            raise UsageError(
                "a rate limit needs both limit_max (jobs) and limit_ms", contract=CONTRACT
            )

    @property
    def key_prefix(self) -> str:
        """The prefix of every key of the queue."""
        return f"{self.prefix}:{self.queue}:"


def keys(key_prefix: str) -> Keys:
    """The keys of a queue."""
    return Keys(*(key_prefix + name for name in _KEY_NAMES))


def client_name(options: Options, worker_id: str = "") -> str:
    """The connection name by which `queue.getWorkers()` and dashboards know a worker.

    Redis allows no spaces in it, so BullMQ encodes the queue's name in base64.
    """
    queue = base64.b64encode(options.queue.encode()).decode()
    name = "".join(c if c.isprintable() and c not in ' "' else "-" for c in worker_id)
    return f"{options.prefix}:{queue}" + (f":w:{name}" if name else "")


PRIORITY_MAX = 2_097_151

# What a failed child does to its parent; a job has at most one of these.
PARENT_OPTIONS = {
    "removeDependencyOnFailure": "rdof",
    "failParentOnFailure": "fpof",
    "continueParentOnFailure": "cpof",
    "ignoreDependencyOnFailure": "idof",
}
# The names that users write, and the short names in Redis.
SHORT = {
    **PARENT_OPTIONS,
    "keepLogs": "kl",
    "deduplication": "de",
    "telemetryMetadata": "tm",
    "omitContext": "omc",
}
_UNDERSCORE = re.compile("_([a-z])")
_LONG = {short: long for long, short in SHORT.items()}
_KNOWN = frozenset(
    {
        *SHORT,
        *SHORT.values(),
        *("jobId", "attempts", "backoff", "delay", "lifo", "parent", "priority", "repeat"),
        *("removeOnComplete", "removeOnFail", "sizeLimit", "stackTraceLimit", "timestamp"),
        *("repeatJobKey", "prevMillis", "count", "telemetry"),
    }
)


class Keep(msgspec.Struct, frozen=True):
    """How many finished jobs to keep: None means no limit, a count of 0 removes the job itself.

    `limit` is how many jobs that are too old one settle removes.
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


def long_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under BullMQ's long names, from those or snake_case; raises for unknown ones."""
    out: dict[str, Any] = {}
    for name, value in options.items():
        long = _UNDERSCORE.sub(lambda found: found[1].upper(), name) if "_" in name else name
        if long not in _KNOWN:
            raise InvalidJob(
                f"{name!r} is no BullMQ job option; there are: {', '.join(sorted(_KNOWN))}"
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


def pack_options(options: Mapping[str, Any]) -> bytes:
    """The JSON of `opts`, from options under their long names."""
    packed = {SHORT.get(name, name): value for name, value in options.items()}
    packed.setdefault("attempts", 0)
    return msgspec.json.encode(packed)


def unpack_options(raw: bytes) -> dict[str, Any]:
    """All options under their long names, from the JSON of `opts`.

    >>> unpack_options(b'{"attempts":3,"fpof":true}')
    {'attempts': 3, 'failParentOnFailure': True}
    """
    try:
        stored = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}
    options = {_LONG.get(name, name): value for name, value in stored.items()}
    telemetry = {"metadata": options.pop("telemetryMetadata", None)}
    telemetry["omitContext"] = options.pop("omitContext", None)
    if any(value is not None for value in telemetry.values()):
        options["telemetry"] = {k: v for k, v in telemetry.items() if v is not None}
    return options


@functools.lru_cache(maxsize=1_000)
def read_options(raw: bytes) -> JobOptions:
    """What a worker needs of `opts`; the defaults if it is not a JSON object.

    Many jobs have the same options, so the results are cached.
    """
    try:
        given = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        given = None
    if not isinstance(given, dict):
        return JobOptions()
    return JobOptions(
        attempts=whole(given.get("attempts")) or 0,
        backoff=given.get("backoff"),
        lifo=given.get("lifo") is True,
        keep_completed=_keep(given.get("removeOnComplete")),
        keep_failed=_keep(given.get("removeOnFail")),
        stack_trace_limit=whole(given.get("stackTraceLimit")),
        keep_logs=whole(given.get("kl")),
        trace=_trace(given.get("tm")),
    )


def _keep(given: Any) -> Keep | None:
    """`removeOnComplete` and `removeOnFail` in their four forms; None if not given."""
    if given is True:
        return Keep(count=0)
    if isinstance(given, bool) or given is None:
        return None if given is None else Keep()
    if isinstance(given, int | float):
        return Keep(count=whole(given)) if given >= 0 else Keep()
    if isinstance(given, dict):
        count, age, limit = (whole(given.get(name)) for name in ("count", "age", "limit"))
        return Keep(count, age, limit)
    return None


def backoff_ms(backoff: Any, attempts_made: int, chance: float | None = None) -> int:
    """How long to wait before the next attempt, after `attempts_made` have failed.

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
    """The JSON array `stacktrace` with one more entry, cut to the job's limit and to ours."""
    try:
        stack = msgspec.json.decode(earlier) if earlier else []
    except (msgspec.DecodeError, RecursionError):
        stack = []
    stack = [*stack, entry] if isinstance(stack, list) else [entry]
    limit = _STACKS_MAX if limit is None else min(limit, _STACKS_MAX)
    stack = stack[-limit:] if limit > 0 else []
    # Not ASCII, as in Node; lone surrogates cannot be encoded and are replaced.
    return json.dumps(stack, ensure_ascii=False).encode(errors="replace")


def _real(value: Any) -> float:
    return value if isinstance(value, int | float) else 0


def whole(value: Any) -> int | None:
    """A whole number in options of any program; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if abs(value) < 2**53 else None


def _trace(given: Any) -> str:
    """The W3C traceparent in `tm`, which is a JSON object of headers or the header itself."""
    if not isinstance(given, str):
        return ""
    if given.startswith("{"):
        try:
            carrier = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError):
            return ""
        value = carrier.get("traceparent") if isinstance(carrier, dict) else None
        return value if isinstance(value, str) else ""
    return given
