"""One queue as a client holds it open: each side of the seam is opened when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tenure.client.events import FollowedLedger
from tenure.client.feed import JobFeed, News
from tenure.client.follow import EventFollower
from tenure.core.errors import UsageError
from tenure.core.job import NewJob, Submitted
from tenure.core.portable import final_words
from tenure.core.registry import (
    contracts,
    has_part,
    open_journal,
    open_ledger,
    open_part,
    open_queue,
    parse_url,
)
from tenure.core.seam import Flows, Ledger, Queue, Schedules
from tenure.store.resend import submit_with_retry

# A followed job is looked up so often, in case that its end left no event.
_LOOK_MS = 4_000


class Connection:
    """A queue by its URL or name, for one event loop. All handles share its one feed."""

    def __init__(self, url: str) -> None:
        parsed = parse_url(url)
        self.url = parsed.text
        self.contract = parsed.contract
        self.name = parsed.name
        self._queue: Queue | None = None
        self._ledger: Ledger | None = None
        self._feed: JobFeed[EventFollower] | None = None
        self._closing: list[Callable[[], Any]] = []
        self._closed = False

    @property
    def queue(self) -> Queue:
        """The side that stores jobs."""
        self._check_open()
        if self._queue is None:
            self._queue = open_queue(self.url, worker_id="tenure-client")
            self._closing.append(self._queue.close)
        return self._queue

    @property
    def ledger(self) -> Ledger:
        """The side that reads and steers jobs."""
        self._check_open()
        if self._ledger is None:
            self._ledger = open_ledger(self.url)
            self._closing.append(self._ledger.close)
        return self._ledger

    @property
    def feed(self) -> JobFeed[EventFollower]:
        """The one reader of events and ends; it reads only while a handle waits."""
        self._check_open()
        if self._feed is None:
            ledger = self.ledger
            has_news = has_part(self.url, "news")
            news: Any = open_part(self.url, "news") if has_news else open_journal(self.url)
            reader: News = news
            self._feed = JobFeed(
                FollowedLedger(ledger),
                reader,
                final=final_words(self.contract),
                heartbeat_ms=_LOOK_MS,
                few_streams=0,
                waiter=ledger.features.waiter,
            )
            self._feed.start()
            self._closing += [news.close, self._feed.close]
        return self._feed

    @property
    def schedules(self) -> Schedules:
        """The schedules of the queue; raises `UsageError` where it has none."""
        found = self.queue.features.schedules
        if found is None:
            raise UsageError(
                f"{parse_url(self.url).safe} has no schedules: it is an outbox",
                contract=self.contract,
            )
        return found

    @property
    def flows(self) -> Flows:
        """The chains of the queue; raises `UsageError` where it has none."""
        found = self.queue.features.flows
        if found is None:
            others = [each.name for each in contracts().values() if each.has_flows]
            raise UsageError(
                f"{self.contract} cannot chain or gather jobs; contracts that can: "
                f"{', '.join(others)}",
                contract=self.contract,
            )
        return found

    @property
    def is_closed(self) -> bool:
        """Whether it has let go of its connections; it does not open new ones."""
        return self._closed

    async def submit(self, jobs: list[NewJob]) -> list[Submitted]:
        """Store jobs. Each has an id, so that a call whose answer was lost is sent again."""
        return await submit_with_retry(self.queue, jobs) if jobs else []

    async def close(self) -> None:
        """Stop the feed, then let go of all connections."""
        self._closed = True
        closing, self._closing = self._closing[::-1], []
        for close in closing:
            await close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this client is closed; open another one")


def named_call(given: Iterable[Any]) -> tuple[str, Any, Mapping[str, Any]]:
    """A call by name, as `submit_many` takes it: (task, payload) or (task, payload, options)."""
    task, *rest = given
    payload = rest[0] if rest else {}
    options: Mapping[str, Any] = rest[1] if len(rest) > 1 else {}
    return task, payload, options
