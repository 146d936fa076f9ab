"""Runs a search over the ledgers of all queues, newest jobs first, in bounded steps.

Each ledger pages by its own cursor, of which only the beginning and the end of a page are known. So
a place in the merged list is, per queue, the cursor at which its page began and the last job taken
from it: the next call reads that page again and skips what was taken.
"""

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
from tenure.dashboard.house import House, Street, that_answer
from tenure.dashboard.kinds import states_of
from tenure.dashboard.search import Search

PAGE = 50
_STEP = 200
SCAN_MAX = 4_000
COUNT_MAX = 20_000
_TIE_CHARS = 10
_TURN_S = 0.01  # then other requests have their turn
_BUDGET_S = 5.0
_BUDGET_BYTES = 32 * 1024 * 1024
_LEDGER_SCAN = 5_000
_EMPTY_PAGES_MAX = 3  # a ledger looks at some thousand jobs for a page


class PartlyAway(StoreError):
    """The store of a queue is away; what the others have was told."""


class NotAll(Exception):
    """So many jobs were looked at as there may be; the rest was not."""


class FoundJob(msgspec.Struct, frozen=True):
    """A job without its contents, and the name of its queue in this gateway."""

    queue: str
    job: JobRecord


class Found(msgspec.Struct, frozen=True):
    """Some jobs; `after` continues. `complete` is False when the bound or the budget was met before
    the page was full, or the store of a queue is away: the list is then that of the others."""

    jobs: list[FoundJob]
    after: str = ""
    complete: bool = True


class Count(msgspec.Struct, frozen=True):
    """How many jobs match; `exact` False means at least so many."""

    jobs: int
    exact: bool = True


class _Budget:
    """How long one request may search, and how many bytes of jobs it may look at."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + _BUDGET_S
        self.bytes = _BUDGET_BYTES

    @property
    def is_spent(self) -> bool:
        return self.bytes <= 0 or time.monotonic() > self._until_s


class _Place(msgspec.Struct, array_like=True):
    """Where a queue's part of the list stands. `ended` when it has no more.

    `ties` are the ends of the ids that were taken of the last job's millisecond: each contract
    orders such jobs by a rule of its own, and the last one may be gone when the list goes on.
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
        """Whether the job, in a list that lost the last one taken, is still to be shown."""
        if job.created_ms == self.last_ms:
            return job.job_id[-_TIE_CHARS:] not in self.ties
        return job.created_ms < self.last_ms

    def turn_to(self, begun: str) -> None:
        self.begun, self.last_id, self.last_ms, self.ties = begun, "", 0, []


class Finder:
    """Searches. One per dashboard."""

    def __init__(self, street: Street, redaction: Redaction) -> None:
        self._street = street
        self.redaction = redaction
        self._states: dict[str, tuple[str, ...]] = {}

    async def page(self, search: Search, *, after: str = "", limit: int = PAGE) -> Found:
        """The next jobs that match, as far as the budget of a request goes."""
        if search.job_id:
            return Found(await self._by_id(search))
        places = _places(after)
        sources = await self._sources(search, places)
        found = await self._merge(sources, search, limit, _Budget())
        more = any(not source.place.ended for source in sources)
        places |= {source.house.name: source.place for source in sources}
        away = any(source.away for source in sources)
        complete = not away and (len(found) >= limit or not more)
        return Found(found, _cursor(places) if more else "", complete=complete)

    async def each(
        self, search: Search, *, step: int = _STEP, scan_max: int = 0
    ) -> AsyncIterator[list[FoundJob]]:
        """All jobs that match, in steps; jobs that come meanwhile may or may not be among them.

        The lists stay open between the steps, so that jobs may be removed on the way. Where the
        store of a queue is away, `PartlyAway` follows what the others have. With `scan_max` no more
        than about so many jobs are looked at, whether they match or not, within the budget of a
        request; `NotAll` says so.
        """
        if search.job_id:
            yield await self._by_id(search)
            return
        sources = await self._sources(search, {})
        budget = _Budget() if scan_max else None
        while any(not source.place.ended for source in sources):
            if budget and (budget.is_spent or sum(source.looked for source in sources) >= scan_max):
                raise NotAll
            yield await self._merge(sources, search, step, budget)
        _check_any(sources)
        for source in sources:
            if source.away is not None:
                raise PartlyAway(str(source.away))

    async def count(self, search: Search, *, most: int = COUNT_MAX, scan_max: int = 0) -> Count:
        """How many match now, found by looking: a queue's own totals include jobs long gone."""
        seen = 0
        try:
            async for jobs in self.each(search, step=500, scan_max=scan_max):
                seen += len(jobs)
                if seen >= most:
                    return Count(seen, exact=False)
        except (PartlyAway, NotAll):
            return Count(seen, exact=False)
        return Count(seen)

    async def _by_id(self, search: Search) -> list[FoundJob]:
        houses = [house for house in self._street if search.wants_queue(house.name)]
        jobs = await that_answer(house.ledger.get(search.job_id) for house in houses)
        found = [
            await self._judged(search, house, job)
            for house, job in zip(houses, jobs, strict=True)
            if job
        ]
        return [each for each in found if each]

    async def _sources(self, search: Search, places: dict[str, _Place]) -> list[_Source]:
        opened = [await self._source(house, search, places) for house in self._street]
        return [source for source in opened if source is not None]

    async def _source(
        self, house: House, search: Search, places: dict[str, _Place]
    ) -> _Source | None:
        place = places.get(house.name, _Place())
        if place.ended or not search.wants_queue(house.name):
            return None
        try:
            states = search.states(await self._known(house))
        except StoreError as error:
            return _Source(house, (), search.task, place).gone(error)
        if states is None:
            return None
        return _Source(house, states, search.task, place)

    async def _known(self, house: House) -> tuple[str, ...]:
        if house.name not in self._states:
            counted = tuple((await house.ledger.counts()).states)
            self._states[house.name] = states_of(house.contract, counted)
        return self._states[house.name]

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
        while heap and len(found) < limit and scanned < SCAN_MAX:
            _, at = heapq.heappop(heap)
            source = sources[at]
            job = source.take()
            scanned += 1
            if budget:
                budget.bytes -= weight(job)
            if job.created_ms < search.since_ms:  # newest first: all that follow are older still
                source.place.ended = True
                continue
            if (judged := await self._judged(search, source.house, job)) is not None:
                found.append(judged)
            if budget and budget.is_spent:
                break
            if time.monotonic() - begun_s > _TURN_S:
                await asyncio.sleep(0)
                begun_s = time.monotonic()
            if not source.jobs:
                await source.fill()
            if source.jobs:
                heapq.heappush(heap, (-source.head.created_ms, at))
        return found

    async def _judged(self, search: Search, house: House, job: JobRecord) -> FoundJob | None:
        """What lists show of a job that matches: its error masked, and nothing it carries.

        It is judged on what may be seen: a masked value cannot be found out by searching for it.
        """
        roots = {term.name.partition(".")[0] for term in search.terms}
        if roots.isdisjoint(("", "payload", "result", "error")) and not search.matches(
            job, house.name
        ):
            return None
        seen = without_contents(job) if roots.isdisjoint(("", "payload", "result")) else job
        return await self.redaction.apart(size_of(seen), partial(self._judge, search, house, seen))

    def _judge(self, search: Search, house: House, job: JobRecord) -> FoundJob | None:
        shown = self.redaction.record(job)
        if not search.matches(shown, house.name):
            return None
        return FoundJob(house.name, without_contents(shown))


class _Source:
    """The rest of one queue's list."""

    def __init__(self, house: House, states: tuple[str, ...], task: str, place: _Place) -> None:
        self.house = house
        self.place = place
        self.jobs: list[JobRecord] = []
        self._query = Query(states=states, task=task, limit=_STEP)
        self._next: str | None = None
        self.away: StoreError | None = None
        self.looked = 0

    def gone(self, error: StoreError) -> _Source:
        """Its store is away: the list ends here, and those of the other queues go on."""
        self.away, self.place.ended = error, True
        return self

    @property
    def head(self) -> JobRecord:
        return self.jobs[0]

    def take(self) -> JobRecord:
        job = self.jobs.pop(0)
        self.place.took(job)
        if not self.jobs:
            self._page_done()
        return job

    async def fill(self) -> None:
        """Read on until there is a job or the list ends; a rare state is not sought for ever."""
        for _ in range(_EMPTY_PAGES_MAX):
            if self.jobs or self.place.ended:
                return
            begun = self.place.begun if self._next is None else self._next
            asked = msgspec.structs.replace(self._query, after=begun)
            try:
                page = await self.house.ledger.find(asked)
            except StoreError as error:
                self.gone(error)
                return
            # A page that is not full though more follows is all that its ledger looks at for one,
            # but for one whose jobs are large.
            heavy = sum(map(weight, page.jobs)) >= PAGE_BYTES
            cut = page.after and len(page.jobs) < self._query.limit and not heavy
            self.looked += _LEDGER_SCAN if cut else len(page.jobs)
            self.place.begun, self._next = begun, page.after
            self.jobs = _behind(page.jobs, self.place)
            if not self.jobs:
                self._page_done()

    def _page_done(self) -> None:
        if not self._next:
            self.place.ended = True
        else:
            self.place.turn_to(self._next)


def _check_any(sources: Sequence[_Source]) -> None:
    """Raise where every store that was asked is away."""
    away = [source.away for source in sources if source.away is not None]
    if away and len(away) == len(sources):
        raise away[0]


def _behind(jobs: list[JobRecord], place: _Place) -> list[JobRecord]:
    """What follows the last job taken; where that one is gone, what is older than it was."""
    if not place.last_id:
        return list(jobs)
    for at, job in enumerate(jobs):
        if job.job_id == place.last_id:
            return jobs[at + 1 :]
    return [job for job in jobs if place.is_before(job)]


def _cursor(places: dict[str, _Place]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(places)).decode().rstrip("=")


def _places(cursor: str) -> dict[str, _Place]:
    if not cursor:
        return {}
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        return msgspec.json.decode(raw, type=dict[str, _Place])
    except (ValueError, msgspec.MsgspecError):
        raise Conflict("`after` is no place in this list; pass that of the page before") from None
