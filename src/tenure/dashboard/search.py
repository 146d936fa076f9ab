"""The language of the search box: words and `name:value` terms, all of which must hold.

    queue:mail is:failed error:ConnectionError task:send since:2h -payload.plan=free "timed out"

`parse` reads it, `Search.matches` judges one job; what a ledger can filter itself is handed to it
by `finding.py`. The text is the URL's `q`, so every search is a link.
"""

from __future__ import annotations

import difflib
import re
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import msgspec

from tenure.core.errors import UsageError
from tenure.core.job import JobRecord
from tenure.dashboard.kinds import KINDS, kind_of
from tenure.dashboard.reading import decoded, error_class

HELP = (
    ("queue:NAME", "jobs of one queue"),
    ("is:failed", f"by kind, whichever contract: {', '.join(KINDS)}"),
    ("state:WORD", "by the contract's own state, several with commas"),
    ("task:NAME", "by task; * stands for anything"),
    ("error:CLASS", "by error class; * stands for anything"),
    ("id:ID", "one job; * stands for anything"),
    ("worker:NAME", "by the worker that has or had it"),
    ("payload.user.id=7", "by a field of the payload; result.x works too"),
    ("attempt>1", "by the number of attempts; also < and ="),
    ("since:2h  before:2026-01-31", "created within, or before; 30s, 15m, 2h, 7d or a date"),
    ('"two words"', "text in id, task, error or payload"),
    ("-task:x", "a minus turns a term round"),
)

_FIELDS = ("queue", "is", "state", "task", "error", "id", "worker", "since", "before", "attempt")
_TOKEN = re.compile(r'-?(?:[^\s"]*"[^"]*"?|[^\s"]+)')
_TERM = re.compile(
    r"(?P<not>-?)(?P<name>[A-Za-z_][\w.\-\[\]]*)(?P<op>[:=<>])(?P<value>.*)", re.DOTALL
)
_SPAN = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(ms|s|m|h|d|w)")
_SPAN_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_TEXT_MAX = 1_000
_TERMS_MAX = 20
_DIGITS_MAX = 18


class SearchError(UsageError):
    """The text is no search; the message says what would be."""

    code = "invalid"


class Term(msgspec.Struct, frozen=True):
    """One condition; `name` "" is plain text. `value` is lower case where case does not matter."""

    name: str
    op: str
    value: str
    negated: bool = False


class Search(msgspec.Struct, frozen=True):
    """A parsed search. `text` is what was typed."""

    text: str = ""
    terms: tuple[Term, ...] = ()

    def wants_queue(self, queue: str) -> bool:
        """Whether jobs of this queue can match at all."""
        return all(
            _like(queue, term.value) != term.negated for term in self.terms if term.name == "queue"
        )

    def states(self, known: tuple[str, ...]) -> tuple[str, ...] | None:
        """The states to ask a ledger for: () for any, None when no state of the queue can match."""
        terms = [term for term in self.terms if term.name in ("is", "state")]
        if not terms:
            return ()
        left = tuple(state for state in known if all(_in_state(state, term) for term in terms))
        return left or None

    @property
    def task(self) -> str:
        """The one task that is asked for by its full name, else ""."""
        for term in self.terms:
            if term.name == "task" and not term.negated and not _has_wildcard(term.value):
                return term.value
        return ""

    @property
    def job_id(self) -> str:
        """The one job that is asked for by its full id, else ""."""
        for term in self.terms:
            if term.name == "id" and not term.negated and not _has_wildcard(term.value):
                return term.value
        return ""

    @property
    def since_ms(self) -> int:
        """No job older than this can match; 0 for no bound."""
        found = [int(t.value) for t in self.terms if t.name == "since" and not t.negated]
        return max(found, default=0)

    def matches(self, job: JobRecord, queue: str) -> bool:
        """Whether a job of the queue of that name fulfils every term."""
        seen = _Seen(job)
        return all(_holds(term, seen, queue) != term.negated for term in self.terms)


def parse(text: str, *, now_ms: int) -> Search:
    """Read a search; relative times count from `now_ms`."""
    if len(text) > _TEXT_MAX:
        raise SearchError(f"a search has at most {_TEXT_MAX} characters")
    terms = tuple(dict.fromkeys(_term(token, now_ms) for token in _TOKEN.findall(text)))
    if sum(map(_cost, terms)) > _TERMS_MAX:
        raise SearchError(f"a search has at most {_TERMS_MAX} terms")
    return Search(text.strip(), terms)


def _cost(term: Term) -> int:
    """How many terms it counts for: each value of a field of the payload is looked for anew."""
    return 1 + term.value.count(",") if _is_path(term.name) else 1


def _is_path(name: str) -> bool:
    return name.partition(".")[0] in ("payload", "result")


def _term(token: str, now_ms: int) -> Term:
    match = _TERM.fullmatch(token)
    if match is None:
        negated = token.startswith("-") and len(token) > 1
        return Term("", ":", _unquoted(token[1:] if negated else token).lower(), negated)
    name, op, value = match["name"], match["op"], _unquoted(match["value"])
    root = name.partition(".")[0].lower()
    negated = bool(match["not"])
    if root in ("payload", "result"):
        return Term(root + name[len(root) :], op, value, negated)
    if name.lower() not in _FIELDS:
        return _unknown(token, name, negated=negated)
    return Term(name.lower(), op, _value(name.lower(), op, value, now_ms), negated)


def _unknown(token: str, name: str, *, negated: bool) -> Term:
    """A mistyped field is said; what is no field at all, such as a URL, is text."""
    close = difflib.get_close_matches(name.lower(), (*_FIELDS, "payload", "result"), n=1)
    if close:
        raise SearchError(f"there is no {name!r} to search by, did you mean {close[0]!r}?")
    return Term("", ":", _unquoted(token[1:] if negated else token).lower(), negated)


def _value(name: str, op: str, value: str, now_ms: int) -> str:
    if not value:
        raise SearchError(f"{name}{op} needs a value, such as {_example(name)}")
    if name in ("since", "before"):
        return str(_moment(value, now_ms))
    if name == "attempt":
        if not value.isdecimal() or len(value) > _DIGITS_MAX:
            raise SearchError(f"attempt is compared with a number, not {value[:40]!r}")
        return value
    if name == "is" and (wrong := set(value.split(",")) - set(KINDS)):
        raise SearchError(f"is:{min(wrong)} is unknown; there are {', '.join(KINDS)}")
    return value


def _example(name: str) -> str:
    return next((line for line, _ in HELP if line.startswith(name)), f"{name}:x")


def _moment(value: str, now_ms: int) -> int:
    span = _SPAN.fullmatch(value)
    if span:
        return now_ms - int(float(span[1]) * _SPAN_MS[span[2]])
    try:
        when = datetime.fromisoformat(value)
        return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise SearchError(
            f"{value[:40]!r} is no time; write 30s, 15m, 2h, 7d, or 2026-01-31T12:00 (UTC)"
        ) from None


def _unquoted(text: str) -> str:
    return text.replace('"', "")


def _has_wildcard(pattern: str) -> bool:
    return "*" in pattern or "," in pattern


def _like(text: str, pattern: str) -> bool:
    """Any of the comma-separated patterns; only `*` is special."""
    escaped = (re.sub(r"([\[?])", r"[\1]", part) for part in pattern.split(","))
    return any(fnmatchcase(text, part) for part in escaped)


def _in_state(state: str, term: Term) -> bool:
    words = term.value.split(",")
    found = kind_of(state) in words if term.name == "is" else state in words
    return found != term.negated


class _Seen:
    """A job, and what is made of it for the terms: each once, whatever their number."""

    def __init__(self, job: JobRecord) -> None:
        self.job = job

    @cached_property
    def haystack(self) -> str:
        job = self.job
        parts = (job.job_id.encode(), job.task.encode(), job.error, job.payload)
        return b"\n".join(parts).decode(errors="replace").lower()

    @cached_property
    def payload(self) -> Any:
        return decoded(self.job.payload)

    @cached_property
    def result(self) -> Any:
        return decoded(self.job.result)

    @cached_property
    def error(self) -> str:
        return error_class(self.job.error)


def _holds(term: Term, seen: _Seen, queue: str) -> bool:
    job = seen.job
    match term.name:
        case "queue":
            return _like(queue, term.value)
        case "is" | "state":
            return _in_state(job.state, Term(term.name, term.op, term.value))
        case "attempt":
            return _compares(job.attempt, term.op, int(term.value))
        case "since":
            return job.created_ms >= int(term.value)
        case "before":
            return job.created_ms < int(term.value)
        case "":
            return term.value in seen.haystack
        case "task" | "error" | "id" | "worker":
            return _like(_text_of(term.name, seen), term.value)
    return _field_holds(term, seen)


def _text_of(name: str, seen: _Seen) -> str:
    job = seen.job
    match name:
        case "task":
            return job.task
        case "id":
            return job.job_id
        case "worker":
            return job.worker_id
    return seen.error


def _compares(number: float, op: str, other: float) -> bool:
    match op:
        case "<":
            return number < other
        case ">":
            return number > other
    return number == other


def _field_holds(term: Term, seen: _Seen) -> bool:
    root, _, path = term.name.partition(".")
    found = _at(seen.payload if root == "payload" else seen.result, path)
    if term.op in "<>":
        try:
            return _compares(float(found), term.op, float(term.value))
        except (TypeError, ValueError, OverflowError):  # some payloads hold larger integers
            return False
    return found is not None and _like(_plain(found), term.value)


def _at(value: Any, path: str) -> Any:
    for part in path.split(".") if path else ():
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()
