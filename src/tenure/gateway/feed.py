"""The feed of a queue for event streams: frames made once for all clients, secrets masked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tenure.client.events import FollowLedger
from tenure.client.feed import CHUNK_EVENTS_MAX, PAGE, JobFeed, News
from tenure.core.job import JobEvent, JobRecord, position
from tenure.core.redaction import Redaction
from tenure.core.seam import EventWaiter, is_full
from tenure.gateway.sse import HEARTBEAT, Subscriber, end_others, end_replaced, frame


class Feed(JobFeed[Subscriber]):
    """Serves one queue to HTTP clients, with heartbeats. `final` are the types that end a stream.

    `on_events` is told how many events were served.
    """

    def __init__(
        self,
        ledger: FollowLedger,
        journal: News,
        *,
        final: Iterable[str],
        sweep_ms: int = 1_000,
        heartbeat_ms: int = 15_000,
        client_bytes_max: int = 256 * 1024,
        on_events: Callable[[int], object] = lambda count: None,
        redaction: Redaction | None = None,
        waiter: EventWaiter | None = None,
    ) -> None:
        super().__init__(
            ledger,
            journal,
            final=final,
            sweep_ms=sweep_ms,
            heartbeat_ms=heartbeat_ms,
            waiter=waiter,
        )
        self._bytes_max = client_bytes_max
        self._on_events = on_events
        self._redaction = redaction or Redaction()

    def subscribe(
        self,
        job_id: str,
        after: str,
        *,
        masked: bool = False,
        origin: tuple[str, int] | None = None,
    ) -> Subscriber:
        """A new follower of a job, after a position ("" for all); `leave` when it is done.

        `masked` hides the secrets in the events: the follower is not the job's requester. With
        `origin`, it ends when this id belongs to a job with another origin.
        """
        subscriber = Subscriber(
            job_id,
            after,
            bytes_max=self._bytes_max,
            now_s=time.monotonic(),
            catch_up=self.catch_up,
        )
        subscriber.page = PAGE
        subscriber.masked = masked
        subscriber.origin = origin
        return self.follow(subscriber)

    async def _end_replaced(self, followers: Iterable[Subscriber]) -> None:
        await end_replaced(self._ledger.get, followers)

    def _end_others(self, followers: Iterable[Subscriber], record: JobRecord | None) -> None:
        end_others(followers, record)

    async def _give(self, follower: Subscriber, events: list[JobEvent]) -> bool:
        if follower.masked:
            events = await self._redaction.events(events, may_wait=True)
        served = given = 0
        for event in events:
            given += 1
            at, last = position(event.event_id), event.type in self._final
            served += follower.take(event, at=at, last=last)
            if follower.is_behind:
                break
        self._on_events(served)
        # A client that is behind gets no more than it was just given: the rest would be read twice.
        follower.page = max(1, given) if follower.is_behind else PAGE
        return not follower.is_behind

    async def _deliver(self, job_id: str, events: list[JobEvent]) -> bool:
        hidden: dict[str, JobEvent] = {}
        if self._masks(job_id):
            masked = await self._redaction.events(events, may_wait=True)
            hidden = {event.event_id: event for event in masked}
        channel = self._channels.get(job_id)
        if channel is None or not events:
            return False
        now_s, served = time.monotonic(), 0
        for event, at in channel.new(events):
            framed, last = {False: frame(event)}, event.type in self._final
            if self._masks(job_id):
                # Where the events are not masked, this subscriber came after they were read.
                framed[True] = frame(hidden.get(event.event_id) or self._redaction.event(event))
            for subscriber in channel.followers:
                own = framed[subscriber.masked]
                if subscriber.live and subscriber.event(event, own, at=at, last=last):
                    subscriber.pushed_s = now_s
                    served += 1
        self._on_events(served)
        return is_full(events, CHUNK_EVENTS_MAX)

    def _masks(self, job_id: str) -> bool:
        channel = self._channels.get(job_id)
        return channel is not None and any(each.masked for each in channel.followers)

    def _beat(self, job_ids: Iterable[str], now_s: float) -> None:
        for job_id in job_ids:
            channel = self._channels.get(job_id)
            for subscriber in channel.followers if channel else ():
                if now_s - subscriber.pushed_s >= self._heartbeat_s:
                    subscriber.pushed_s = now_s
                    subscriber.push(HEARTBEAT)
