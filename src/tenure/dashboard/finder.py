"""The search over the ledgers of all queues: pages, batches and counts of matching jobs."""

from __future__ import annotations

import asyncio
import base64
import heapq
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

import msgspec

from tenure.core.errors import Conflict, StoreError
from tenure.core.job import JobRecord
from tenure.core.redaction import Redaction, size_of, without_contents
from tenure.core.seam import PAGE_BYTES, Query, weight
from tenure.dashboard.queues import OpenQueue, QueueRegistry, gather_available, states_of
from tenure.dashboard.search import Search

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


class PartlyUnreachable(StoreError):
    """The store of a queue does not answer; the jobs of the other queues were found."""


class ScanLimit(Exception):
    """The limit of jobs to read was reached before the end."""


class FoundJob(msgspec.Struct, frozen=True):
    """A job without its contents, and the name of its queue in this gateway."""

    queue: str
    job: JobRecord


class FoundPage(msgspec.Struct, frozen=True):
    """A page of jobs; `after` is the cursor of the next page. `complete` is False if a limit was
    reached before the page was full, or if the store of a queue does not answer."""

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


class JobFinder:
    """Runs searches over the ledgers of all queues, newest jobs first, in bounded steps.

    A ledger has cursors only for the beginning and the end of its pages. So a position in the
    merged list is, per queue, the cursor of the current page and the last job taken from it. The
    next call reads that page again and skips what was taken.
    """

    def __init__(self, queues: QueueRegistry, redaction: Redaction) -> None:
        self._queues = queues
        self.redaction = redaction
        self._states: dict[str, tuple[str, ...]] = {}

    async def page(self, search: Search, *, after: str = "", limit: int = _PAGE) -> FoundPage:
        """The next jobs that match, within the budget of a request."""
        if search.job_id:
            return FoundPage(await self._by_id(search))
        positions = _positions(after)
        sources = await self._sources(search, positions)
        found = await self._merge(sources, search, limit, _Budget())
        more = any(not source.position.ended for source in sources)
        positions |= {source.queue.name: source.position for source in sources}
        away = any(source.away for source in sources)
        complete = not away and (len(found) >= limit or not more)
        return FoundPage(found, _cursor(positions) if more else "", complete=complete)

    async def each(
        self, search: Search, *, step: int = _BATCH, scan_max: int = 0
    ) -> AsyncIterator[list[FoundJob]]:
        """All jobs that match, in batches; may include jobs that are submitted meanwhile.

        Jobs may be removed between the batches. If the store of a queue does not answer,
        `PartlyUnreachable` is raised after the jobs of the others. With `scan_max`, `ScanLimit` is
        raised after so many jobs, or when the budget of a request is spent.
        """
        if search.job_id:
            yield await self._by_id(search)
            return
        sources = await self._sources(search, {})
        budget = _Budget() if scan_max else None
        while any(not source.position.ended for source in sources):
            scanned = sum(source.scanned for source in sources)
            if budget and (budget.is_spent or scanned >= scan_max):
                raise ScanLimit
            yield await self._merge(sources, search, step, budget)
        _check_any(sources)
        for source in sources:
            if source.away is not None:
                raise PartlyUnreachable(str(source.away))

    async def count(self, search: Search, *, most: int = COUNT_MAX, scan_max: int = 0) -> CountView:
        """How many jobs match, found by a scan: the totals of a queue include removed jobs."""
        seen = 0
        try:
            async for jobs in self.each(search, step=500, scan_max=scan_max):
                seen += len(jobs)
                if seen >= most:
                    return CountView(seen, exact=False)
        except (PartlyUnreachable, ScanLimit):
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
            states = search.states(queue.contract, await self._known(queue))
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
        heap = [
            (-source.jobs[0].created_ms, at) for at, source in enumerate(sources) if source.jobs
        ]
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
                heapq.heappush(heap, (-source.jobs[0].created_ms, at))
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
        return await self.redaction.in_thread_if_large(
            size_of(seen), partial(self._match, search, queue, seen)
        )

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
        raise Conflict(
            "`after` is not a cursor of this list; pass the one of the previous page"
        ) from None
