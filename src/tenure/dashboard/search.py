"""The search language, and the search over the ledgers of all queues.

    queue:mail is:failed error:ConnectionError task:send since:2h -payload.plan=free "timed out"

`parse` parses a search, `Search.matches` tests one job, `Finder` pages through all queues. The text
is the parameter `q` of the URL, so every search is a link.
"""

from __future__ import annotations

import asyncio
import base64
import difflib
import heapq
import re
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any

import msgspec

from tenure.core.errors import Conflict, StoreError, UsageError
from tenure.core.job import JobRecord
from tenure.core.redaction import Redaction, size_of, without_contents
from tenure.core.seam import PAGE_BYTES, Query, weight
from tenure.dashboard.display import decode_json, error_class, now_ms
from tenure.dashboard.queues import (
    KINDS,
    OpenQueue,
    QueueRegistry,
    gather_available,
    kind_of,
    states_of,
)

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

_PAGE = 50
_BATCH = 200
_SCAN_MAX = 4_000
COUNT_MAX = 20_000
_TIE_CHARS = 10
_YIELD_S = 0.01  # then the event loop may run other requests
_BUDGET_S = 5.0
_BUDGET_BYTES = 32 * 1024 * 1024
_LEDGER_SCAN = 5_000
_EMPTY_PAGES_MAX = 3  # a ledger reads some thousand jobs for one page


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

    def states(self, known: tuple[str, ...]) -> tuple[str, ...] | None:
        """The states to ask a ledger for: () for any, None when no state of the queue can match."""
        terms = [term for term in self.terms if term.name in ("is", "state")]
        if not terms:
            return ()
        left = tuple(state for state in known if all(_in_state(state, term) for term in terms))
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


def _like(text: str, pattern: str) -> bool:
    """Whether the text matches one of the comma-separated patterns; only `*` is special."""
    escaped = (re.sub(r"([\[?])", r"[\1]", part) for part in pattern.split(","))
    return any(fnmatchcase(text, part) for part in escaped)


def _in_state(state: str, term: Term) -> bool:
    words = term.value.split(",")
    found = kind_of(state) in words if term.name == "is" else state in words
    return found != term.negated


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
    job = read.job
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
            return term.value in read.haystack
        case "error":
            return _like(read.error, term.value)
        case "task" | "id" | "worker":
            return _like(getattr(job, _ATTRIBUTES[term.name]), term.value)
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


class PartlyAway(StoreError):
    """The store of a queue does not answer; the jobs of the other queues were found."""


class ScanLimit(Exception):
    """The limit of jobs to read was reached before the end."""


class FoundJob(msgspec.Struct, frozen=True):
    """A job without its contents, and the name of its queue in this gateway."""

    queue: str
    job: JobRecord


class Found(msgspec.Struct, frozen=True):
    """A page of jobs; `after` is the cursor of the next page.

    `complete` is False if the scan limit or the budget was reached before the page was full, or if
    the store of a queue does not answer; then the jobs of the other queues are listed.
    """

    jobs: list[FoundJob]
    after: str = ""
    complete: bool = True


class CountView(msgspec.Struct, frozen=True):
    """How many jobs match; `exact` false means at least so many."""

    jobs: int
    exact: bool


class _Budget:
    """How long one request may search, and how many bytes of jobs it may read."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + _BUDGET_S
        self.bytes = _BUDGET_BYTES

    @property
    def is_spent(self) -> bool:
        return self.bytes <= 0 or time.monotonic() > self._until_s


class _Position(msgspec.Struct, array_like=True):
    """The position in one queue's list; `ended` if there are no more jobs.

    `begun` is the cursor of the current page. `ties` are the ends of the ids of the jobs taken from
    the last millisecond. Contracts order jobs of one millisecond differently, and the last job may
    have been removed when the next page is read.
    """

    begun: str = ""
    last_id: str = ""
    last_ms: int = 0
    ended: bool = False
    ties: list[str] = msgspec.field(default_factory=list)

    def took(self, job: JobRecord) -> None:
        if job.created_ms != self.last_ms:
            self.ties = []
        self.ties.append(job.job_id[-_TIE_CHARS:])
        self.last_id, self.last_ms = job.job_id, job.created_ms

    def is_before(self, job: JobRecord) -> bool:
        """Whether a job is after this position, if the last job taken was removed."""
        if job.created_ms == self.last_ms:
            return job.job_id[-_TIE_CHARS:] not in self.ties
        return job.created_ms < self.last_ms

    def turn_to(self, begun: str) -> None:
        self.begun, self.last_id, self.last_ms, self.ties = begun, "", 0, []


class Finder:
    """Runs searches over the ledgers of all queues, newest jobs first, in bounded steps.

    A ledger has cursors only for the beginning and the end of its pages. So a position in the
    merged list is, per queue, the cursor of the current page and the last job taken from it. The
    next call reads that page again and skips what was taken.
    """

    def __init__(self, queues: QueueRegistry, redaction: Redaction) -> None:
        self._queues = queues
        self.redaction = redaction
        self._states: dict[str, tuple[str, ...]] = {}

    async def page(self, search: Search, *, after: str = "", limit: int = _PAGE) -> Found:
        """The next jobs that match, within the budget of a request."""
        if search.job_id:
            return Found(await self._by_id(search))
        positions = _positions(after)
        sources = await self._sources(search, positions)
        found = await self._merge(sources, search, limit, _Budget())
        more = any(not source.position.ended for source in sources)
        positions |= {source.queue.name: source.position for source in sources}
        away = any(source.away for source in sources)
        complete = not away and (len(found) >= limit or not more)
        return Found(found, _cursor(positions) if more else "", complete=complete)

    async def each(
        self, search: Search, *, step: int = _BATCH, scan_max: int = 0
    ) -> AsyncIterator[list[FoundJob]]:
        """All jobs that match, in batches; may include jobs that are submitted meanwhile.

        Jobs may be removed between the batches. If the store of a queue does not answer,
        `PartlyAway` is raised after the jobs of the others. With `scan_max`, `ScanLimit` is raised
        after so many jobs, or when the budget of a request is spent.
        """
        if search.job_id:
            yield await self._by_id(search)
            return
        sources = await self._sources(search, {})
        budget = _Budget() if scan_max else None
        while any(not source.position.ended for source in sources):
            if budget and (
                budget.is_spent or sum(source.scanned for source in sources) >= scan_max
            ):
                raise ScanLimit
            yield await self._merge(sources, search, step, budget)
        _check_any(sources)
        for source in sources:
            if source.away is not None:
                raise PartlyAway(str(source.away))

    async def count(self, search: Search, *, most: int = COUNT_MAX, scan_max: int = 0) -> CountView:
        """How many jobs match, found by a scan: the totals of a queue include removed jobs."""
        seen = 0
        try:
            async for jobs in self.each(search, step=500, scan_max=scan_max):
                seen += len(jobs)
                if seen >= most:
                    return CountView(seen, exact=False)
        except (PartlyAway, ScanLimit):
            return CountView(seen, exact=False)
        return CountView(seen, exact=True)

    async def _by_id(self, search: Search) -> list[FoundJob]:
        queues = [queue for queue in self._queues if search.wants_queue(queue.name)]
        jobs = await gather_available(queue.ledger.get(search.job_id) for queue in queues)
        found = [
            await self._matching(search, queue, job)
            for queue, job in zip(queues, jobs, strict=True)
            if job
        ]
        return [each for each in found if each]

    async def _sources(self, search: Search, positions: dict[str, _Position]) -> list[_Source]:
        opened = [await self._source(queue, search, positions) for queue in self._queues]
        return [source for source in opened if source is not None]

    async def _source(
        self, queue: OpenQueue, search: Search, positions: dict[str, _Position]
    ) -> _Source | None:
        position = positions.get(queue.name, _Position())
        if position.ended or not search.wants_queue(queue.name):
            return None
        try:
            states = search.states(await self._known(queue))
        except StoreError as error:
            return _Source(queue, (), search.task, position).gone(error)
        return None if states is None else _Source(queue, states, search.task, position)

    async def _known(self, queue: OpenQueue) -> tuple[str, ...]:
        if queue.name not in self._states:
            counted = tuple((await queue.ledger.counts()).states)
            self._states[queue.name] = states_of(queue.contract, counted)
        return self._states[queue.name]

    async def _merge(
        self, sources: Sequence[_Source], search: Search, limit: int, budget: _Budget | None
    ) -> list[FoundJob]:
        found: list[FoundJob] = []
        scanned = 0
        await asyncio.gather(*(source.fill() for source in sources))
        _check_any(sources)
        heap = [(-source.head.created_ms, at) for at, source in enumerate(sources) if source.jobs]
        heapq.heapify(heap)
        begun_s = time.monotonic()
        while heap and len(found) < limit and scanned < _SCAN_MAX:
            _, at = heapq.heappop(heap)
            source = sources[at]
            job = source.take()
            scanned += 1
            if budget:
                budget.bytes -= weight(job)
            if job.created_ms < search.since_ms:  # newest first: all others are older still
                source.position.ended = True
                continue
            if (match := await self._matching(search, source.queue, job)) is not None:
                found.append(match)
            if budget and budget.is_spent:
                break
            if time.monotonic() - begun_s > _YIELD_S:
                await asyncio.sleep(0)
                begun_s = time.monotonic()
            if not source.jobs:
                await source.fill()
            if source.jobs:
                heapq.heappush(heap, (-source.head.created_ms, at))
        return found

    async def _matching(self, search: Search, queue: OpenQueue, job: JobRecord) -> FoundJob | None:
        """The job for a list if it matches: secrets masked, without payload and result.

        The masked job is searched, so that a search cannot be used to guess a masked value.
        """
        roots = {term.name.partition(".")[0] for term in search.terms}
        is_plain = roots.isdisjoint(("", "payload", "result", "error"))
        if is_plain and not search.matches(job, queue.name):
            return None
        seen = without_contents(job) if roots.isdisjoint(("", "payload", "result")) else job
        return await self.redaction.apart(size_of(seen), partial(self._match, search, queue, seen))

    def _match(self, search: Search, queue: OpenQueue, job: JobRecord) -> FoundJob | None:
        shown = self.redaction.record(job)
        if not search.matches(shown, queue.name):
            return None
        return FoundJob(queue.name, without_contents(shown))


class _Source:
    """The remaining jobs of one queue."""

    def __init__(
        self, queue: OpenQueue, states: tuple[str, ...], task: str, position: _Position
    ) -> None:
        self.queue = queue
        self.position = position
        self.jobs: list[JobRecord] = []
        self._query = Query(states=states, task=task, limit=_BATCH)
        self._next: str | None = None
        self.away: StoreError | None = None
        self.scanned = 0

    def gone(self, error: StoreError) -> _Source:
        """End the list because the store does not answer; the other queues go on."""
        self.away, self.position.ended = error, True
        return self

    @property
    def head(self) -> JobRecord:
        return self.jobs[0]

    def take(self) -> JobRecord:
        job = self.jobs.pop(0)
        self.position.took(job)
        if not self.jobs:
            self._page_done()
        return job

    async def fill(self) -> None:
        """Read pages until there is a job, the list ends, or too many pages were empty."""
        for _ in range(_EMPTY_PAGES_MAX):
            if self.jobs or self.position.ended:
                return
            begun = self.position.begun if self._next is None else self._next
            query = msgspec.structs.replace(self._query, after=begun)
            try:
                page = await self.queue.ledger.find(query)
            except StoreError as error:
                self.gone(error)
                return
            # If a page is not full though more follow, the ledger has read its maximum of jobs,
            # unless the jobs are so large that they fill the page.
            heavy = sum(map(weight, page.jobs)) >= PAGE_BYTES
            cut = page.after and len(page.jobs) < self._query.limit and not heavy
            self.scanned += _LEDGER_SCAN if cut else len(page.jobs)
            self.position.begun, self._next = begun, page.after
            self.jobs = _not_taken(page.jobs, self.position)
            if not self.jobs:
                self._page_done()

    def _page_done(self) -> None:
        if not self._next:
            self.position.ended = True
        else:
            self.position.turn_to(self._next)


def _check_any(sources: Sequence[_Source]) -> None:
    """Raise if no store answers."""
    away = [source.away for source in sources if source.away is not None]
    if away and len(away) == len(sources):
        raise away[0]


def _not_taken(jobs: list[JobRecord], position: _Position) -> list[JobRecord]:
    """The jobs after the last one taken, or the older ones if that one was removed."""
    if not position.last_id:
        return list(jobs)
    for at, job in enumerate(jobs):
        if job.job_id == position.last_id:
            return jobs[at + 1 :]
    return [job for job in jobs if position.is_before(job)]


def _cursor(positions: dict[str, _Position]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(positions)).decode().rstrip("=")


def _positions(cursor: str) -> dict[str, _Position]:
    if not cursor:
        return {}
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        return msgspec.json.decode(raw, type=dict[str, _Position])
    except (ValueError, msgspec.MsgspecError):
        raise Conflict("`after` is no place in this list; pass that of the page before") from None
