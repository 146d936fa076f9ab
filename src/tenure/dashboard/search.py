"""The search language of pages and /api.

    queue:mail is:failed error:ConnectionError task:send since:2h -payload.plan=free "timed out"

`parse` parses a search, `Search.matches` tests one job, and `finder` runs a search over all queues.
The text is the parameter `q` of the URL, so every search is a link.
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
from tenure.core.portable import STATES, meanings, state_of
from tenure.dashboard.display import decode_json, error_class, now_ms

HELP = (
    ("queue:NAME", "jobs of one queue"),
    ("is:failed", f"by state, for every contract: {', '.join(STATES)}"),
    ("state:WORD", "by the contract's own word for it, several with commas"),
    ("task:NAME", "by task; * matches anything"),
    ("error:CLASS", "by error class; * matches anything"),
    ("id:ID", "one job; * matches anything"),
    ("worker:NAME", "by the worker that has or had it"),
    ("payload.user.id=7", "by a field of the payload; result.x works too"),
    ("attempt>1", "by the number of attempts; also < and ="),
    ("since:2h  before:2026-01-31", "created within, or before; 30s, 15m, 2h, 7d or a date"),
    ('"two words"', "text in id, task, error or payload"),
    ("-task:x", "a minus negates a term"),
)

_FIELDS = ("queue", "is", "state", "task", "error", "id", "worker", "since", "before", "attempt")
_ATTRIBUTES = {"task": "task", "id": "job_id", "worker": "worker_id"}
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
    """The search cannot be parsed; the message says what is accepted."""

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
        """Whether jobs of this queue can match."""
        terms = [term for term in self.terms if term.name == "queue"]
        return all(_like(queue, term.value) != term.negated for term in terms)

    def states(self, contract: str, known: tuple[str, ...]) -> tuple[str, ...] | None:
        """The words to ask a ledger for: () for any, None when none of the queue can match."""
        terms = [term for term in self.terms if term.name in ("is", "state")]
        if not terms:
            return ()
        left = tuple(word for word in known if all(_may_be(contract, word, t) for t in terms))
        return left or None

    @property
    def task(self) -> str:
        """The task, if the search names exactly one, else ""."""
        return self._exact("task")

    @property
    def job_id(self) -> str:
        """The job id, if the search names exactly one, else ""."""
        return self._exact("id")

    def _exact(self, name: str) -> str:
        for term in self.terms:
            if term.name == name and not term.negated and not set("*,") & set(term.value):
                return term.value
        return ""

    @property
    def since_ms(self) -> int:
        """No job older than this can match; 0 for no bound."""
        found = [int(t.value) for t in self.terms if t.name == "since" and not t.negated]
        return max(found, default=0)

    def matches(self, job: JobRecord, queue: str) -> bool:
        """Whether a job of this queue matches every term."""
        read = _ReadJob(job)
        return all(_holds(term, read, queue) != term.negated for term in self.terms)


def parse(text: str, *, now_ms: int) -> Search:
    """Parse a search; relative times count from `now_ms`."""
    if len(text) > _TEXT_MAX:
        raise SearchError(f"a search has at most {_TEXT_MAX} characters")
    terms = tuple(dict.fromkeys(_term(token, now_ms) for token in _TOKEN.findall(text)))
    if sum(map(_cost, terms)) > _TERMS_MAX:
        raise SearchError(f"a search has at most {_TERMS_MAX} terms")
    return Search(text.strip(), terms)


def _cost(term: Term) -> int:
    """The cost in terms: each value of a payload field is searched for separately."""
    return 1 + term.value.count(",") if term.name.startswith(("payload", "result")) else 1


def parse_now(text: str) -> Search:
    """Parse a search; relative times count from now."""
    return parse(text, now_ms=now_ms())


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
    """A mistyped field is an error; other words with a colon, such as a URL, are text."""
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
    if name == "is" and (wrong := set(value.split(",")) - set(STATES)):
        raise SearchError(f"is:{min(wrong)} is unknown; the states are {', '.join(STATES)}")
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
            f"{value[:40]!r} is not a time; write 30s, 15m, 2h, 7d, or 2026-01-31T12:00 (UTC)"
        ) from None


def _unquoted(text: str) -> str:
    return text.replace('"', "")


def _like(text: str, pattern: str) -> bool:
    """Whether the text matches one of the comma-separated patterns; only `*` is special."""
    escaped = (re.sub(r"([\[?])", r"[\1]", part) for part in pattern.split(","))
    return any(fnmatchcase(text, part) for part in escaped)


def _may_be(contract: str, word: str, term: Term) -> bool:
    """Whether a job under this word of its contract may be in a state that the term accepts."""
    states = meanings(contract, word) if term.name == "is" else {word}
    named = set(term.value.split(","))
    return bool(states - named if term.negated else states & named)


class _ReadJob:
    """A job with its decoded parts, each decoded at most once for all terms."""

    def __init__(self, job: JobRecord) -> None:
        self.job = job

    payload = cached_property(lambda self: decode_json(self.job.payload))
    result = cached_property(lambda self: decode_json(self.job.result))
    error = cached_property(lambda self: error_class(self.job.error))

    @cached_property
    def haystack(self) -> str:
        job = self.job
        parts = (job.job_id.encode(), job.task.encode(), job.error, job.payload)
        return b"\n".join(parts).decode(errors="replace").lower()


def _holds(term: Term, read: _ReadJob, queue: str) -> bool:
    match term.name:
        case "queue":
            return _like(queue, term.value)
        case "is":
            return state_of(read.job) in term.value.split(",")
        case "state":
            return read.job.state in term.value.split(",")
        case "attempt":
            return _compares(read.job.attempt, term.op, int(term.value))
        case "since":
            return read.job.created_ms >= int(term.value)
        case "before":
            return read.job.created_ms < int(term.value)
        case "":
            return term.value in read.haystack
        case "error":
            return _like(read.error, term.value)
        case "task" | "id" | "worker":
            return _like(getattr(read.job, _ATTRIBUTES[term.name]), term.value)
    return _field_holds(term, read)


def _compares(number: float, op: str, other: float) -> bool:
    return number < other if op == "<" else number > other if op == ">" else number == other


def _field_holds(term: Term, read: _ReadJob) -> bool:
    root, _, path = term.name.partition(".")
    found = _value_at(read.payload if root == "payload" else read.result, path)
    if term.op in "<>":
        try:
            return _compares(float(found), term.op, float(term.value))
        except (TypeError, ValueError, OverflowError):  # some payloads hold larger integers
            return False
    text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
    return found is not None and _like(text, term.value)


def _value_at(value: Any, path: str) -> Any:
    for part in path.split(".") if path else ():
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value
