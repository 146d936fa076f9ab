"""News of jobs over HTTP: the events of one job as JSON, and a long poll for the steps of all.

A client awaits any number of jobs with one request: `GET /v1/plane/news` answers as soon as one of
the caller's jobs has moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import takewhile
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from tenure.contracts.plane.schemas import EventId, PlaneJobNews
from tenure.core.encoding import answer_json
from tenure.core.endpoint import Answer, Call, Endpoint, Refused, Reply, Right
from tenure.core.job import JobEvent, JobRecord
from tenure.core.journal import JournalEvent
from tenure.core.redaction import Redaction
from tenure.core.seam import Journal, Ledger, is_full
from tenure.store.batcher import Turns

_NEWS_KEPT = 10_000
_LOOK_S = 0.25
_POSITION = re.compile(r"[0-9]{1,18}")


class PlaneJobEvent(PlaneJobNews, frozen=True, kw_only=True):
    """An event of a job; `id` is its position."""

    id: str


class PlaneJobHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Events of a job, oldest first. `complete` is false if more follow."""

    events: list[PlaneJobEvent]
    complete: bool


class AskHistory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which events of a job."""

    after: EventId = ""
    limit: Annotated[int, Meta(ge=1, le=1000, description="How many at most.")] = 1000


class AskNews(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From where on, and how long to wait for the first news."""

    after: Annotated[
        str,
        Meta(
            description="The `after` of the last answer; without it, only that is answered.",
            extra_json_schema={"pattern": "^[0-9]{0,18}$"},
        ),
    ] = ""
    wait_ms: Annotated[int, Meta(ge=0, le=60_000, description="How long to wait for news.")] = 0


class JobMoved(msgspec.Struct, frozen=True):
    """A step of a job: what happened (`type`), and its status after it."""

    job_id: str
    type: str
    status: str


class PlaneNews(msgspec.Struct, frozen=True):
    """Steps of your jobs, oldest first; `after` is the position to go on from."""

    after: str
    moved: list[JobMoved]


class ListeningJournal(Journal, Protocol):
    """A journal on connections that it shares."""

    async def stop_listening(self) -> None:
        """Listen for nothing any more; the connections stay open."""


class Moved(NamedTuple):
    """A step of a job, its position in the journal, and whose job it is."""

    position: int
    job_id: str
    stream: str
    requester: str
    type: str
    state: str


Reader = tuple[str | None, frozenset[str]]
"""Whose news are read (None: everyone's) and of which streams (none: of all)."""


class _Waiter:
    """One who waits for news: the position up to which it has looked, and the steps found then."""

    __slots__ = ("after", "found", "woken")

    def __init__(self, after: int) -> None:
        self.after = after
        self.found: list[Moved] = []
        self.woken = asyncio.Event()


class NewsTail:
    """Reads the journal once for all who wait for news of their jobs over HTTP.

    One of those who wait reads for all of them, and another goes on when that one leaves. The
    others are woken only by steps of their own jobs. A reader whose position is too old for what is
    kept here reads the journal itself, a page at a time and not more than half of the time, and one
    such reader of a key after the other.
    """

    def __init__(
        self,
        journal: ListeningJournal,
        requesters: Callable[[Collection[str]], Awaitable[dict[str, str]]],
    ) -> None:
        self._journal = journal
        self._requesters = requesters
        self._reading = asyncio.Lock()
        self._waiting: dict[Reader, dict[_Waiter, None]] = {}
        self._behind = Turns(1)
        self._kept: deque[Moved] = deque()
        self._first = self._last = -1

    async def last(self) -> int:
        """The position of the newest step."""
        return int(await self._journal.last())

    async def wait(self, after: int, wait_ms: int, reader: Reader) -> tuple[list[Moved], int]:
        """The steps after a position that concern a reader, and the position up to which it has
        looked."""
        try:
            return await self._find(after, wait_ms, reader)
        finally:
            self._hand_over()

    async def _find(self, after: int, wait_ms: int, reader: Reader) -> tuple[list[Moved], int]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            if self._is_kept(after):
                found, after = self._look(after, reader), self._last
            else:
                after = min(after, await self._newest(after, deadline))
                found, after = await self._catch_up(after, reader, deadline)
            left_ms = round((deadline - loop.time()) * 1000)
            if found or left_ms <= 0:
                return found, after
            if after < self._last:  # the others are further: catch up before waiting with them
                if not self._is_kept(after):
                    await asyncio.sleep(min(left_ms / 1000, _LOOK_S))
                continue
            waiter = _Waiter(after)
            await self._wait(waiter, reader, left_ms)
            if waiter.found:
                return waiter.found, waiter.after
            after = waiter.after

    async def close(self) -> None:
        """Listen for nothing any more."""
        await self._journal.stop_listening()

    def _is_kept(self, after: int) -> bool:
        return self._first <= after <= self._last

    def _look(self, after: int, reader: Reader) -> list[Moved]:
        """The steps after a position, of those that are kept."""
        new = takewhile(lambda each: each.position > after, reversed(self._kept))
        return [each for each in new if _concerns(each, reader)][::-1]

    async def _newest(self, after: int, deadline: float) -> int:
        """The end of the journal, so that nobody waits at a position beyond it: all would have to
        wait there. It is 0 while the journal is empty, and while a transaction stays open."""
        while after > max(self._last, 0):
            newest = await self.last()
            left_s = deadline - asyncio.get_running_loop().time()
            if newest or left_s <= 0:
                return newest or after
            await asyncio.sleep(min(left_s, _LOOK_S))
        return after

    async def _catch_up(
        self, after: int, reader: Reader, deadline: float
    ) -> tuple[list[Moved], int]:
        """Read the journal from an old position to the first news, or to where the others are."""
        clock = asyncio.get_running_loop().time
        async with self._behind.of(reader[0] or ""):
            while True:
                begun = clock()
                events = await self._journal.read(after=str(after))
                steps, after = await self._steps(events), _end(events, after)
                found = [each for each in steps if _concerns(each, reader)]
                if found or not events or self._is_kept(after) or clock() >= deadline:
                    return found, after
                await asyncio.sleep(clock() - begun)  # the others have the other half of the time

    async def _wait(self, waiter: _Waiter, reader: Reader, left_ms: int) -> None:
        """Wait for news: read them, or wait for the one who does."""
        same = self._waiting.setdefault(reader, {})
        same[waiter] = None
        try:
            if not self._reading.locked():
                async with self._reading:
                    await self._read(waiter, left_ms)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(waiter.woken.wait(), left_ms / 1000)
        finally:
            del same[waiter]
            if not same and self._waiting.get(reader) is same:
                del self._waiting[reader]

    def _hand_over(self) -> None:
        """One leaves: if it was the one who reads, wake another, to go on reading."""
        if not self._reading.locked():
            for waiters in self._waiting.values():
                for waiter in waiters:
                    if not waiter.woken.is_set():
                        waiter.woken.set()
                        return

    async def _read(self, waiter: _Waiter, left_ms: int) -> None:
        """Read for all who wait, until there is news for this one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + left_ms / 1000
        if waiter.after != self._last:
            self._kept.clear()
            self._first = self._last = waiter.after
        while not waiter.found and (left_ms := round((deadline - loop.time()) * 1000)) > 0:
            events = await self._journal.wait(after=str(self._last), wait_ms=left_ms)
            steps = await self._steps(events)
            self._kept.extend(steps)
            self._last = _end(events, self._last)
            while len(self._kept) > _NEWS_KEPT:
                self._first = self._kept.popleft().position
            self._tell(steps)

    def _tell(self, steps: Sequence[Moved]) -> None:
        """Give those who wait the steps that concern them."""
        by_owner: dict[str, list[Moved]] = {}
        for step in steps:
            by_owner.setdefault(step.requester, []).append(step)
        for reader, waiters in self._waiting.items():
            own = steps if reader[0] is None else by_owner.get(reader[0], ())
            found = [each for each in own if _concerns(each, reader)]
            for waiter in waiters:
                waiter.found += [each for each in found if each.position > waiter.after]
                waiter.after = max(waiter.after, self._last)
                if waiter.found:
                    waiter.woken.set()

    async def _steps(self, events: list[JournalEvent]) -> list[Moved]:
        whose = await self._requesters({event.job_id for event in events})
        return [
            Moved(
                int(event.seq),
                event.job_id,
                event.queue,
                whose[event.job_id],
                event.type,
                event.to_state,
            )
            for event in events
            if event.job_id in whose
        ]


def _concerns(step: Moved, reader: Reader) -> bool:
    whose, streams = reader
    return whose in (None, step.requester) and (not streams or step.stream in streams)


def _end(events: Sequence[JournalEvent], before: int) -> int:
    """The position of the last event, the one before it if there is none."""
    return int(events[-1].seq) if events else before


class NewsRoutes:
    """The endpoints; `record_of` reads the job that a call names, if the caller may see it."""

    def __init__(
        self,
        ledger: Ledger,
        news: NewsTail,
        redaction: Redaction,
        record_of: Callable[[Call], Awaitable[JobRecord]],
    ) -> None:
        self._ledger = ledger
        self._news = news
        self._redaction = redaction
        self._record = record_of

    async def history(self, call: Call) -> Answer:
        """A page of the job's events."""
        query: AskHistory = call.query
        record = await self._record(call)
        check_position(query.after)
        events = await self._ledger.events(record.job_id, after=query.after, limit=query.limit)
        complete = not is_full(events, query.limit)
        if not call.caller.owns(record.requester):
            events = await self._redaction.events(events)
        return Answer(200, PlaneJobHistory(events=list(map(event_view, events)), complete=complete))

    async def news(self, call: Call) -> Answer:
        """Steps of the caller's jobs; waits for the first, while the client is connected."""
        query: AskNews = call.query
        if not query.after:
            return Answer(200, PlaneNews(str(await self._news.last()), []))
        check_position(query.after)
        reader = (call.reach, call.caller.streams)
        waiting = asyncio.ensure_future(self._news.wait(int(query.after), query.wait_ms, reader))
        gone = asyncio.ensure_future(call.gone()) if call.gone else waiting
        try:
            await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
            found, after = waiting.result() if waiting.done() else ([], int(query.after))
        finally:
            waiting.cancel()
            gone.cancel()
            await asyncio.gather(waiting, gone, return_exceptions=True)
        if query.wait_ms and call.is_allowed is not None and not await call.is_allowed():
            found, after = [], int(query.after)  # its key was revoked while it waited
        moved = [JobMoved(each.job_id, each.type, each.state) for each in found]
        return Answer(200, PlaneNews(str(after), moved))

    def endpoints(self) -> list[Endpoint]:
        """The endpoints for the gateway."""
        return [
            Endpoint(
                method="GET",
                path="/v1/plane/jobs/{job_id}/history",
                operation="readPlaneJobHistory",
                summary="The events of a job of the plane so far",
                right=Right("jobs:read", "own", streams=True),
                handle=self.history,
                asks=AskHistory,
                replies={200: Reply("Events after a position.", PlaneJobHistory)},
                problems=(400, 404, 422),
                tag="plane",
            ),
            Endpoint(
                method="GET",
                path="/v1/plane/news",
                operation="readPlaneNews",
                summary="Which of your jobs have moved",
                description="A long poll: one request waits for the news of any number of jobs. "
                "Ask without `after` for the position to begin at.",
                right=Right("jobs:read", "own", streams=True),
                handle=self.news,
                asks=AskNews,
                replies={200: Reply("What happened after a position.", PlaneNews)},
                problems=(400, 422),
                tag="plane",
            ),
        ]


def check_position(after: str) -> None:
    """Refuse what is no position in a history."""
    if after and not _POSITION.fullmatch(after):
        raise Refused("bad_cursor", f"{after[:60]!r} is not a position such as 3")


def event_view(event: JobEvent) -> PlaneJobEvent:
    """An event for an answer."""
    return PlaneJobEvent(
        id=event.event_id,
        type=event.type,
        ts=event.ts_ms,
        step=event.step,
        data=answer_json(event.data) if event.data else None,
    )
