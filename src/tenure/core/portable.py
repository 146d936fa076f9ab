"""What callers of every contract share: the portable state of a job, and options of a submit.

A contract keeps its own words for states, and has some of the options. What it does not have is
refused by name, with the contracts that have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache, lru_cache
from typing import Any, Literal, TypedDict

import msgspec

from tenure.core.convert import payload_of
from tenure.core.errors import InvalidJob, UnknownContract, UsageError
from tenure.core.job import JobRecord, NewJob, new_job_id
from tenure.core.registry import Contract, contracts, find_contract

State = Literal["waiting", "scheduled", "running", "done", "failed", "cancelled"]
"""waiting: for a worker. scheduled: for its time, until a worker's upkeep sees that it has come.
running: a worker has it. done, failed and cancelled are the ends; where a contract has one word for
the last two, the job's error tells."""


class SubmitOptions(TypedDict, total=False):
    """How a job is to be stored. What its contract does not have is refused.

    id        the job's id: a repeated submit answers with the job there is
    key       an idempotency key: the same key and payload answer with the same job
    delay_s   seconds (or a timedelta) before it may run
    priority  the lowest number runs first
    attempts  how often it may be started, the first time included
    group     jobs of a group share the group's limit
    ttl_s     seconds to live, as the contract means it
    unique    while a job with this word waits or runs, that job is the answer
    extra     the contract's own job options, by its own names
    """

    id: str
    key: str
    delay_s: float | timedelta
    priority: int
    attempts: int
    group: str
    ttl_s: float | timedelta
    unique: str
    extra: Mapping[str, Any]


_OPTIONS = frozenset(SubmitOptions.__annotations__)
_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("id", "key", "group", "unique"), ((str,), "text")),
    **dict.fromkeys(("priority", "attempts"), ((int,), "a whole number")),
    **dict.fromkeys(("delay_s", "ttl_s"), ((int, float, timedelta), "seconds or a timedelta")),
    "extra": ((Mapping,), "a mapping"),
}
_MS_MAX = 2**53  # what every store keeps exactly: 285,000 years

STATES: tuple[State, ...] = ("waiting", "scheduled", "running", "done", "failed", "cancelled")

_SCHEDULED = "delayed"
_CANCEL_CODES = frozenset({"cancelled", "Cancel"})
# The options that only some contracts have: what each is called, and the value that means none.
_MEANS: Mapping[str, tuple[str, Any]] = {
    "priority": ("priorities", 0),
    "group": ("groups", ""),
    "ttl_s": ("time to live", None),
    "unique": ("unique jobs", ""),
}


class _Code(msgspec.Struct):
    code: str = ""
    message: str = ""


def state_of(record: JobRecord) -> State:
    """The portable state of a job."""
    state = _state_of_word(record.contract, record.state)
    if state == "waiting" and record.due_ms > 0 and not _names_scheduled(record.contract):
        return "scheduled"
    if state == "failed" and _is_cancelled(record.error):
        return "cancelled"
    return state


def end_of(contract: str, word: str) -> State | None:
    """The end that a state or an event of this name means; None if it is none.

    >>> end_of("plane", "DLQ"), end_of("inbox", "failed"), end_of("bullmq", "progress")
    ('failed', None, None)
    """
    return _state_of_word(contract, word) if word in final_words(contract) else None


def final_words(contract: str) -> tuple[str, ...]:
    """The contract's own words for the ends of a job."""
    return _contract(contract).machine.final


def own_words(contract: str, states: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The words out of `known` under which jobs of these states may be found.

    A state is a portable one or a word of the contract. One word may stand for several states: a
    job that is found by it is in one of them only if `is_in` says so.
    """
    wanted = set(states)
    own = {word for word in wanted if word not in STATES}
    return tuple(word for word in known if word in own or meanings(contract, word) & wanted)


def is_in(record: JobRecord, states: Sequence[str]) -> bool:
    """Whether a job is in one of these states, portable ones or words of its contract."""
    return state_of(record) in states or (record.state in states and record.state not in STATES)


def meanings(contract: str, word: str) -> frozenset[State]:
    """The states in which a job under this word of the contract may be."""
    state = _state_of_word(contract, word)
    if state == "waiting" and not _names_scheduled(contract):
        return frozenset({"waiting", "scheduled"})
    return frozenset({"failed", "cancelled"}) if state == "failed" else frozenset({state})


def word_state(contract: str, word: str) -> State | None:
    """The state that a word of the contract means, of a job or of one of its events.

    None if it means none.
    """
    found = _contract(contract)
    if word in found.machine.states or word == _SCHEDULED:
        return _state_of_word(contract, word)
    return found.kinds.get(word)


def known_words(contract: str) -> tuple[str, ...]:
    """The contract's own words for the states in which its jobs are listed."""
    known = _contract(contract)
    return (*known.machine.states, *(word for word in known.kinds if word == "paused"))


def portable_counts(contract: str, counts: Mapping[str, int]) -> dict[State, int]:
    """Counts by portable state. What shares a word is counted under `waiting` and `failed`."""
    totals: dict[State, int] = dict.fromkeys(STATES, 0)
    for word, count in counts.items():
        totals[_state_of_word(contract, word)] += count
    return totals


def check_options(contract: str, given: Mapping[str, Any]) -> None:
    """Refuse options that are given, and that this contract does not have."""
    for name, means, none in _missing_options(contract):
        if given.get(name) not in (None, none):
            others = [each.name for each in contracts().values() if name in each.submit_options]
            raise InvalidJob(
                f"{contract} has no {means} ({name}): leave it out, or use a contract that has it: "
                f"{', '.join(others)}",
                contract=contract,
            )


@cache
def _missing_options(contract: str) -> list[tuple[str, str, Any]]:
    has = _contract(contract).submit_options
    return [(name, means, none) for name, (means, none) in _MEANS.items() if name not in has]


def own_options(contract: str, unique: str) -> dict[str, Any]:
    """The contract's own job options for the portable ones that it writes in its own way."""
    written = _contract(contract).unique_option
    return written(unique) if unique and written is not None else {}


def new_job(contract: str, task: str, payload: bytes, options: Mapping[str, Any]) -> NewJob:
    """A job with these options, under a new id if they name none.

    Raises `InvalidJob` for an option that the contract does not have.
    """
    if unknown := sorted(options.keys() - _OPTIONS):
        raise UsageError(
            f"submit has no option {', '.join(unknown)}; there are {', '.join(sorted(_OPTIONS))}, "
            "and the payload of a task that is named is one value"
        )
    _check_types(options)
    check_options(contract, options)
    ttl_s = options.get("ttl_s")
    own = own_options(contract, options.get("unique") or "")
    return NewJob(
        task=task,
        payload=payload,
        job_id=options.get("id") or new_job_id(),
        idempotency_key=options.get("key") or "",
        delay_ms=_ms(options.get("delay_s") or 0),
        priority=options.get("priority") or 0,
        max_attempts=options.get("attempts"),
        gid=options.get("group") or "",
        ttl_ms=None if ttl_s is None else _ms(ttl_s),
        options={**own, **(options.get("extra") or {})},
    )


def _check_types(options: Mapping[str, Any]) -> None:
    """Refuse what a store would misread or refuse with words of its own. None is as left out."""
    for name, value in options.items():
        kinds, means = _TYPES[name]
        if value is not None and (not isinstance(value, kinds) or value is True or value is False):
            raise InvalidJob(f"{name} is {means}, not {value!r}")


def _ms(seconds: float | timedelta) -> int:
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    if not abs(seconds) * 1000 <= _MS_MAX:  # also nan
        raise InvalidJob(f"a time in seconds is a number that can be reached, not {seconds}")
    return round(seconds * 1000)


def job_of_call(
    contract: str, what: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[NewJob, Any]:
    """The job that the arguments of a `submit` mean, and the type of its result."""
    task, payload, options, result_type = parts_of_call(what, args, kwargs)
    return new_job(contract, task, payload, options), result_type


def parts_of_call(
    what: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, bytes, dict[str, Any], Any]:
    """Task, payload, options and result type that the arguments of a `submit` mean.

    `what` is a task, a call of one, or the name of a task.
    """
    if isinstance(what, str):
        if len(args) > 1:
            raise UsageError("a task by its name takes one payload, and options by name")
        given = args[0] if args else {}
        payload = given if isinstance(given, bytes) else payload_of(given, what)
        return what, payload, dict(kwargs), Any
    if hasattr(what, "payload"):  # a call
        return what.task.name, what.payload, {**what.options, **kwargs}, what.task.result_type
    if not hasattr(what, "call"):
        raise UsageError(
            f"{what!r} is no task; decorate it with @task(name), or give the name of a task"
        )
    if what.parameters is None and args:
        call, options = what.call(args[0]), dict(kwargs)
    else:
        call, options = what.call(*args, **kwargs), {}
    return what.name, call.payload, options, what.result_type


def check_job_options(contract: str, job: NewJob) -> None:
    """As `check_options`, for a job of the seam."""
    if not (job.priority or job.gid or job.ttl_ms is not None):
        return
    check_options(contract, {"priority": job.priority, "group": job.gid, "ttl_s": job.ttl_ms})


@cache
def _contract(name: str) -> Contract:
    """The descriptor of a contract; finding it takes longer than all the rest here."""
    found = find_contract(name)
    if found is None:
        raise UnknownContract(f"there is no contract {name!r}")
    return found


@lru_cache(maxsize=1024)  # other programs may have stored any word
def _state_of_word(contract: str, word: str) -> State:
    machine = _contract(contract).machine
    if word == _SCHEDULED:
        return "scheduled"
    if word in machine.final or word in machine.running:
        return machine.kind(word)
    return "waiting"  # also where a failed attempt rests until it is tried again


def _names_scheduled(contract: str) -> bool:
    """Whether the contract has a word of its own for jobs that wait for their time."""
    return _SCHEDULED in _contract(contract).machine.states


def _is_cancelled(error: bytes) -> bool:
    if b"ancel" not in error:
        return False
    try:
        return msgspec.json.decode(error, type=_Code).code in _CANCEL_CODES
    except (msgspec.DecodeError, RecursionError):
        return False
