"""From a job to the arguments of the publish script, and back from its answer."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Literal

import msgspec

from tenure.contracts.omniq.errors import OptionValue, PayloadType, PayloadValue
from tenure.contracts.omniq.options import Options
from tenure.contracts.omniq.ulid import new_ulid
from tenure.core.errors import InvalidJob
from tenure.core.job import (
    NewJob,
    Submitted,
    check_job,
    check_trace,
    request_hash,
    scoped_key,
    short_hash,
    submitted,
)
from tenure.store.redis import Arg

Backoff = Literal["fixed", "exponential"]

BACKOFF_MS_MAX = 600_000
_COUNT_MAX = 9 * 10**15
_JOB_ID = re.compile(r"[A-Za-z0-9_.@:-]{1,128}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_STARTS = (b"{", b"[")
_JOB_OPTIONS = frozenset({"group_limit", "timeout_ms", "backoff_ms", "backoff", "backoff_ms_max"})
_PLAIN = ("job_id", "payload", "payload_h")
_GROUPED = (*_PLAIN, "gid")
_WHOLE = (*_GROUPED, "trace", "idempotency_key", "request_h")
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What jobs of a run have in common; field for field what the script's header says."""

    max_attempts: int
    timeout_ms: int
    backoff_ms: int
    due_ms: int = 0
    delay_ms: int = 0
    group_limit: int = 0
    task: str = ""
    requester: str = ""
    backoff: str = ""
    backoff_ms_max: int = BACKOFF_MS_MAX


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """One job as the publish script takes it."""

    shape: Shape
    job_id: str
    payload: bytes
    payload_h: str
    gid: str = ""
    trace: str = ""
    idempotency_key: str = ""
    request_h: str = ""


class Shapes:
    """The shapes of the jobs of one submit: most have the same, which is made and checked once."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._plain: dict[tuple[str, str, int | None, int], Shape] = {}

    def of(self, job: NewJob) -> Shape:
        """The shape of a job; raises `InvalidJob` for options that cannot be."""
        if job.options:
            return self._made(job)
        key = (job.task, job.requester, job.max_attempts, job.delay_ms)
        shape = self._plain.get(key)
        if shape is None:
            shape = self._plain[key] = self._made(job)
        return shape

    def _made(self, job: NewJob) -> Shape:
        own, options = job.options, self._options
        check_options(own)
        shape = Shape(
            max_attempts=options.max_attempts if job.max_attempts is None else job.max_attempts,
            timeout_ms=own.get("timeout_ms", options.timeout_ms),
            backoff_ms=own.get("backoff_ms", options.backoff_ms),
            delay_ms=job.delay_ms,
            group_limit=own.get("group_limit", 0),
            task=job.task,
            requester=job.requester,
            backoff=own.get("backoff", ""),
            backoff_ms_max=own.get("backoff_ms_max", BACKOFF_MS_MAX),
        )
        check_number("timeout_ms", shape.timeout_ms, 50)
        check_number("backoff_ms", shape.backoff_ms, 0)
        check_number("group_limit", shape.group_limit, 0)
        check_number("backoff_ms_max", shape.backoff_ms_max, 0)
        return shape


def script_args(jobs: Iterable[Publication]) -> list[Arg]:
    """The jobs as arguments of the publish script: in runs of one shape."""
    args: list[Arg] = []
    for shape, run in groupby(jobs, attrgetter("shape")):
        rows = list(run)
        parts = _parts(rows)
        args += (len(rows), len(parts))
        args += msgspec.structs.astuple(shape)
        args += chain.from_iterable(map(attrgetter(*parts), rows))
    return args


def _parts(rows: Sequence[Publication]) -> tuple[str, ...]:
    """What has to be told of each of these jobs: nothing that none of them has."""
    if any(row.trace or row.idempotency_key for row in rows):
        return _WHOLE
    return _GROUPED if any(row.gid for row in rows) else _PLAIN


def structured(payload: Any) -> Any:
    """A dataclass, msgspec struct or pydantic model as what JSON has words for."""
    if hasattr(payload, "model_dump"):
        return payload.model_dump(mode="json")
    if isinstance(payload, msgspec.Struct) or dataclasses.is_dataclass(payload):
        return msgspec.to_builtins(payload)
    return payload


def json_of(payload: Any) -> bytes:
    """The payload as OmniQ stores it: compact JSON, UTF-8 as it is. Objects and arrays only."""
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
    job_id: str | None,
    timeout_ms: int,
    max_attempts: int,
    backoff_ms: int,
    due_ms: int,
    gid: str | None,
    group_limit: int,
    backoff: Backoff,
    backoff_ms_max: int,
) -> Publication:
    """What `publish` of the contract's API was asked for, checked."""
    body = json_of(payload)
    # OmniQ takes any max_attempts, and what is below 1 acts as 1.
    numbers = {"timeout_ms": (timeout_ms, 1), "max_attempts": (max_attempts, -_COUNT_MAX)}
    numbers |= {"backoff_ms": (backoff_ms, 0), "due_ms": (due_ms, 0)}
    numbers |= {"group_limit": (group_limit, 0), "backoff_ms_max": (backoff_ms_max, 0)}
    for name, (value, least) in numbers.items():
        check_number(name, value, least)
    if backoff not in ("fixed", "exponential"):
        raise OptionValue(f"backoff is 'fixed' or 'exponential', not {backoff!r}")
    chosen = new_ulid() if job_id is None else job_id
    if not chosen or len(chosen) > 512 or _CONTROL.search(chosen):
        raise OptionValue(f"job_id {chosen!r:.60}: 1 to 512 characters, no control characters")
    shape = Shape(
        max_attempts=max_attempts,
        timeout_ms=timeout_ms,
        backoff_ms=backoff_ms,
        due_ms=due_ms,
        group_limit=group_limit,
        backoff="" if backoff == "fixed" else backoff,
        backoff_ms_max=backoff_ms_max,
    )
    return Publication(
        shape=shape,
        job_id=chosen,
        payload=body,
        payload_h=short_hash(body),
        gid=check_gid(gid),
    )


def from_new_job(job: NewJob, shapes: Shapes) -> Publication:
    """What a job of the seam means here; raises `InvalidJob` for what cannot be."""
    job_id = job.job_id or new_ulid()
    check_new_job(job, job_id)
    shape = shapes.of(job)
    payload_h = short_hash(job.payload)
    gid = check_gid(job.gid) if job.gid else ""
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


def check_new_job(job: NewJob, job_id: str) -> None:
    """Refuse what this contract cannot keep."""
    if not _JOB_ID.fullmatch(job_id):
        raise InvalidJob(f"job id {job_id[:140]!r}: 1 to 128 of letters, digits and _ . @ : -")
    check_job(job)
    check_trace(job.trace)
    if job.ttl_ms is not None:
        raise InvalidJob("OmniQ jobs have no time to live; leave ttl_ms out")
    if job.priority:
        raise InvalidJob("OmniQ has no priorities; leave it out, or use a group per kind of work")
    if not job.payload.lstrip().startswith(_STARTS):
        raise InvalidJob('an OmniQ payload is a JSON object or array; wrap it: {"value": ...}')


def check_options(own: Mapping[str, Any]) -> None:
    """Refuse options of a job that this contract does not have."""
    unknown = own.keys() - _JOB_OPTIONS
    if unknown:
        there = ", ".join(sorted(_JOB_OPTIONS))
        raise InvalidJob(f"no such job option: {', '.join(sorted(unknown))}; there are {there}")
    if own.get("backoff", "exponential") != "exponential":
        raise InvalidJob("backoff is 'exponential', or left out for a fixed delay")


def check_gid(gid: str | None) -> str:
    """A group's name as OmniQ keeps it: without blanks around it, "" for no group."""
    name = (gid or "").strip()
    if len(name) > 512 or _CONTROL.search(name):
        raise OptionValue(f"gid {name!r:.60}: at most 512 characters, no control characters")
    return name


def check_number(name: str, value: Any, least: int) -> None:
    """Whole milliseconds and counts only: a script would cut or garble anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _COUNT_MAX:
        raise OptionValue(f"{name} is a whole number of {least} to 9e15, not {value!r:.60}")


def answers(reply: list[Any], jobs: Sequence[Publication], options: Options) -> list[Submitted]:
    """The seam's answers for the script's, which tells of those jobs that it did not create."""
    now_ms, *others = reply
    told = [Submitted(job.job_id, "created", created_ms=now_ms) for job in jobs]
    for position, status, job_id, created_ms in others:
        told[position - 1] = submitted(
            status.decode(),
            job_id.decode(errors="replace"),
            created_ms,
            depth_max=options.max_depth,
        )
    return told
