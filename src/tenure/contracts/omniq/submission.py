"""Turns jobs into the arguments of the publish script, and its reply into answers."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Literal, TypedDict

import msgspec

from tenure.contracts.omniq.options import (
    BACKOFF_MS,
    CONTRACT,
    MAX_ATTEMPTS,
    TIMEOUT_MS,
    Options,
    OptionValue,
    PayloadType,
    PayloadValue,
)
from tenure.core.encoding import short_hash
from tenure.core.errors import InvalidJob
from tenure.core.job import (
    NewJob,
    Submitted,
    check_job,
    check_trace,
    request_hash,
    scoped_key,
    submitted,
)
from tenure.core.portable import check_job_options
from tenure.store.redis import Arg

Backoff = Literal["fixed", "exponential"]

_BACKOFF_MS_MAX = 600_000
_COUNT_MAX = 9 * 10**15
_JOB_ID = re.compile(r"[A-Za-z0-9_.@:-]{1,128}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_STARTS = (b"{", b"[")
_JOB_OPTIONS = frozenset({"group_limit", "timeout_ms", "backoff_ms", "backoff", "backoff_ms_max"})
_PLAIN = ("job_id", "payload", "payload_h")
_GROUPED = (*_PLAIN, "gid")
_WHOLE = (*_GROUPED, "trace", "idempotency_key", "request_h")
_ULID_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ULID_PAIRS = [a + b for a in _ULID_ALPHABET for b in _ULID_ALPHABET]
_ULID_RANDOM_BITS = 80
_ulid_lock = threading.Lock()
_ulid_last = 0
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def new_ulid() -> str:
    """A ULID: 48 bits of milliseconds and 80 random bits, in 26 characters that sort by time.

    Within one process each id is greater than the one before, so publish order is id order.

    >>> first, second = new_ulid(), new_ulid()
    >>> len(first), first < second
    (26, True)
    """
    global _ulid_last  # noqa: PLW0603  # one clock for the process
    with _ulid_lock:
        value = (time.time_ns() // 1_000_000) << _ULID_RANDOM_BITS
        if value >> _ULID_RANDOM_BITS > _ulid_last >> _ULID_RANDOM_BITS:
            value |= secrets.randbits(_ULID_RANDOM_BITS - 1)  # the top bit leaves room to count up
        else:
            value = _ulid_last + 1 + secrets.randbits(32)
        _ulid_last = value
    return "".join([_ULID_PAIRS[(value >> shift) & 1023] for shift in range(120, -1, -10)])


class PublishOptions(TypedDict, total=False):
    """The options of `Client.publish`.

    `backoff` "exponential" doubles `backoff_ms` with every attempt, with jitter, up to
    `backoff_ms_max`. Only our own workers follow it.
    """

    job_id: str | None
    timeout_ms: int
    max_attempts: int
    backoff_ms: int
    due_ms: int
    gid: str | None
    group_limit: int
    backoff: Backoff
    backoff_ms_max: int


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What consecutive jobs have in common, in the order of the script's arguments."""

    max_attempts: int
    timeout_ms: int
    backoff_ms: int
    due_ms: int = 0
    delay_ms: int = 0
    group_limit: int = 0
    task: str = ""
    requester: str = ""
    backoff: str = ""
    backoff_ms_max: int = _BACKOFF_MS_MAX


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """One job for the publish script."""

    shape: Shape
    job_id: str
    payload: bytes
    payload_h: str
    gid: str = ""
    trace: str = ""
    idempotency_key: str = ""
    request_h: str = ""


def script_args(jobs: Iterable[Publication]) -> list[Arg]:
    """The jobs as arguments of the publish script; consecutive jobs of one shape share it."""
    args: list[Arg] = []
    for shape, run in groupby(jobs, attrgetter("shape")):
        rows = list(run)
        fields = _fields_used(rows)
        args += (len(rows), len(fields))
        args += msgspec.structs.astuple(shape)
        args += chain.from_iterable(map(attrgetter(*fields), rows))
    return args


def _fields_used(rows: Sequence[Publication]) -> tuple[str, ...]:
    """The fields to send of each of these jobs: those that at least one of them has."""
    if any(row.trace or row.idempotency_key for row in rows):
        return _WHOLE
    return _GROUPED if any(row.gid for row in rows) else _PLAIN


def structured(payload: Any) -> Any:
    """A dataclass, msgspec struct or pydantic model as plain JSON values."""
    if hasattr(payload, "model_dump"):
        return payload.model_dump(mode="json")
    if isinstance(payload, msgspec.Struct) or dataclasses.is_dataclass(payload):
        return msgspec.to_builtins(payload)
    return payload


def _json(payload: Any) -> bytes:
    """The payload as OmniQ stores it: compact JSON without \\u escapes, an object or array."""
    if not isinstance(payload, dict | list):
        raise PayloadType(
            f"a payload is a JSON object or array, not {type(payload).__name__}; "
            "wrap it: {'value': ...}"
        )
    try:
        return _encode(payload).encode()
    except TypeError as error:
        raise PayloadType(f"the payload is not JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise PayloadValue(f"the payload is not JSON: {error}") from None


def publication(
    payload: Any,
    *,
    job_id: str | None = None,
    timeout_ms: int = TIMEOUT_MS,
    max_attempts: int = MAX_ATTEMPTS,
    backoff_ms: int = BACKOFF_MS,
    due_ms: int = 0,
    gid: str | None = None,
    group_limit: int = 0,
    backoff: Backoff = "fixed",
    backoff_ms_max: int = _BACKOFF_MS_MAX,
) -> Publication:
    """A job from the arguments of `Client.publish`; raises `InvalidJob`."""
    body = _json(payload)
    # OmniQ accepts any max_attempts, and treats a number below 1 as 1.
    check_number("max_attempts", max_attempts, -_COUNT_MAX)
    check_number("timeout_ms", timeout_ms, 1)
    check_number("due_ms", due_ms, 0)
    if backoff not in ("fixed", "exponential"):
        raise OptionValue(f"backoff is 'fixed' or 'exponential', not {backoff!r}")
    chosen = new_ulid() if job_id is None else job_id
    if not chosen or len(chosen) > 512 or _CONTROL.search(chosen):
        raise OptionValue(f"job_id {chosen!r:.60}: 1 to 512 characters, no control characters")
    shape = _checked(
        Shape(
            max_attempts=max_attempts,
            timeout_ms=timeout_ms,
            backoff_ms=backoff_ms,
            due_ms=due_ms,
            group_limit=group_limit,
            backoff="" if backoff == "fixed" else backoff,
            backoff_ms_max=backoff_ms_max,
        )
    )
    return Publication(
        shape=shape, job_id=chosen, payload=body, payload_h=short_hash(body), gid=_gid(gid)
    )


def from_new_job(job: NewJob, options: Options, shapes: dict[Any, Shape]) -> Publication:
    """A job of the seam for the publish script; raises `InvalidJob`.

    Most jobs of one submit have the same shape: `shapes` caches those made so far.
    """
    job_id = job.job_id or new_ulid()
    _check_new_job(job, job_id)
    common = (job.task, job.requester, job.max_attempts, job.delay_ms)
    shape = None if job.options else shapes.get(common)
    if shape is None:
        shape = _shape(job, options)
        if not job.options:
            shapes[common] = shape
    payload_h = short_hash(job.payload)
    gid = _gid(job.gid) if job.gid else ""
    key = same = ""
    if job.idempotency_key:
        key = scoped_key(job.requester, job.idempotency_key)
        same = request_hash(job.task, payload_h, job.requester, job.max_attempts, gid)
    return Publication(
        shape=shape,
        job_id=job_id,
        payload=job.payload,
        payload_h=payload_h,
        gid=gid,
        trace=job.trace,
        idempotency_key=key,
        request_h=same,
    )


def _check_new_job(job: NewJob, job_id: str) -> None:
    """Refuse jobs that this contract cannot store."""
    if not _JOB_ID.fullmatch(job_id):
        raise InvalidJob(f"job id {job_id[:140]!r}: 1 to 128 of letters, digits and _ . @ : -")
    check_job(job)
    check_trace(job.trace)
    check_job_options(CONTRACT, job)
    if not job.payload.lstrip().startswith(_STARTS):
        raise InvalidJob('an OmniQ payload is a JSON object or array; wrap it: {"value": ...}')


def _shape(job: NewJob, options: Options) -> Shape:
    own = job.options
    unknown = own.keys() - _JOB_OPTIONS
    if unknown:
        there = ", ".join(sorted(_JOB_OPTIONS))
        raise InvalidJob(f"no such job option: {', '.join(sorted(unknown))}; there are {there}")
    if own.get("backoff", "exponential") != "exponential":
        raise InvalidJob("backoff is 'exponential', or left out for a fixed delay")
    shape = Shape(
        max_attempts=options.max_attempts if job.max_attempts is None else job.max_attempts,
        timeout_ms=own.get("timeout_ms", options.timeout_ms),
        backoff_ms=own.get("backoff_ms", options.backoff_ms),
        delay_ms=job.delay_ms,
        group_limit=own.get("group_limit", 0),
        task=job.task,
        requester=job.requester,
        backoff=own.get("backoff", ""),
        backoff_ms_max=own.get("backoff_ms_max", _BACKOFF_MS_MAX),
    )
    check_number("timeout_ms", shape.timeout_ms, 50)
    return _checked(shape)


def _checked(shape: Shape) -> Shape:
    check_number("backoff_ms", shape.backoff_ms, 0)
    check_number("group_limit", shape.group_limit, 0)
    check_number("backoff_ms_max", shape.backoff_ms_max, 0)
    return shape


def _gid(gid: str | None) -> str:
    """A group's name as OmniQ stores it, stripped of blanks; "" for no group."""
    name = (gid or "").strip()
    if len(name) > 512 or _CONTROL.search(name):
        raise OptionValue(f"gid {name!r:.60}: at most 512 characters, no control characters")
    return name


def check_number(name: str, value: Any, least: int) -> None:
    """Refuse anything but whole numbers in range: a script would truncate or garble it."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _COUNT_MAX:
        raise OptionValue(f"{name} is a whole number of {least} to 9e15, not {value!r:.60}")


def answers(reply: list[Any], jobs: Sequence[Publication], options: Options) -> list[Submitted]:
    """The seam's answers; the reply lists only the jobs that the script did not create."""
    now_ms, *others = reply
    all_answers = [Submitted(job.job_id, "created", created_ms=now_ms) for job in jobs]
    for position, status, job_id, created_ms in others:
        known = (status.decode(), job_id.decode(errors="replace"), created_ms)
        all_answers[position - 1] = submitted(*known, depth_max=options.max_depth)
    return all_answers
