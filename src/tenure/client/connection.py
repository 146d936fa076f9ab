"""One queue as a client holds it open: each side of the seam is opened when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from tenure.client.events import FollowedLedger
from tenure.client.feed import JobFeed, News
from tenure.client.follow import EventFollower
from tenure.core.convert import payload_of
from tenure.core.errors import UsageError
from tenure.core.job import NewJob, Submitted, new_job_id
from tenure.core.portable import SubmitOptions, check_options, final_words, own_options
from tenure.core.registry import (
    has_part,
    open_journal,
    open_ledger,
    open_part,
    open_queue,
    parse_url,
)
from tenure.core.seam import Ledger, Queue
from tenure.store.resend import submit_with_retry

# A followed job is looked up so often, in case that its end left no event.
_LOOK_MS = 4_000
_OPTIONS = frozenset(SubmitOptions.__annotations__)


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

    async def submit(self, jobs: list[NewJob]) -> list[Submitted]:
        """Store jobs. Each has an id, so that a call whose answer was lost is sent again."""
        return await submit_with_retry(self.queue, jobs) if jobs else []

    def new_job(self, task: str, payload: Any, options: Mapping[str, Any]) -> NewJob:
        """A job with these options; raises `InvalidJob` for one that this contract has not."""
        if unknown := sorted(options.keys() - _OPTIONS):
            raise UsageError(
                f"submit has no option {', '.join(unknown)}; there are "
                f"{', '.join(sorted(_OPTIONS))}, and the payload of a task that is named is one "
                "value"
            )
        check_options(self.contract, options)
        unique = options.get("unique") or ""
        ttl_s = options.get("ttl_s")
        return NewJob(
            task=task,
            payload=payload if isinstance(payload, bytes) else payload_of(payload, task),
            job_id=options.get("id") or new_job_id(),
            idempotency_key=options.get("key") or "",
            delay_ms=_ms(options.get("delay_s") or 0),
            priority=options.get("priority") or 0,
            max_attempts=options.get("attempts"),
            gid=options.get("group") or "",
            ttl_ms=None if ttl_s is None else _ms(ttl_s),
            options={**own_options(self.contract, unique), **(options.get("extra") or {})},
        )

    async def close(self) -> None:
        """Stop the feed, then let go of all connections."""
        self._closed = True
        closing, self._closing = self._closing[::-1], []
        for close in closing:
            await close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this client is closed; open another one")


def _ms(seconds: float | timedelta) -> int:
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    return round(seconds * 1000)


def named_call(given: Iterable[Any]) -> tuple[str, Any, Mapping[str, Any]]:
    """A call by name, as `submit_many` takes it: (task, payload) or (task, payload, options)."""
    task, *rest = given
    payload = rest[0] if rest else {}
    options: Mapping[str, Any] = rest[1] if len(rest) > 1 else {}
    return task, payload, options
