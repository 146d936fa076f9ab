"""Limits concurrent deliveries, so that slow receivers do not hold up the others.

A worker makes a few requests at once (inbox contract, section 12). Without a limit, one receiver
that takes long to answer would soon hold all of these slots. A receiver (an origin of a requester)
is slow if it does not answer within a second. Slow receivers share a part of the slots: of five,
one requester gets two, and all slow receivers together get three.

A delivery beyond that is snoozed, because waiting here would hold a lease and a worker slot. It is
due when its receiver should be free; each delivery gets its own time, so that they come back one
by one. Deliveries to quick receivers wait here for a free slot.

A receiver that this worker has not called yet may be quick or slow; after a restart all are new.
So its first request is a trial:

    when                                            what happens
    ----------------------------------------------  ------------------------------------------------
    a slot is free                                  the trial starts, unless slow receivers and
                                                    trials would then hold all slots: those of one
                                                    requester never may, and all together not while
                                                    there are deliveries to quick receivers
    it cannot start                                 the delivery waits up to a second, then it is
                                                    snoozed
    the trial is answered within half a second      the receiver is quick
    it is not, and slow receivers have a slot left  the receiver is slow; the request goes on
    it is not, and they have none left              the receiver is slow; the request is cancelled
                                                    and the delivery snoozed
    another delivery to it comes during the trial   it waits up to a quarter of a second for the
                                                    first answer, then it is snoozed
    the same, while others are slow or on trial     it is snoozed at once
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tenure.core.outcome import Snooze
from tenure.egress.guard import read_target

AT_ONCE = 5
SLOW_S = 1.0
_NEW_S = 0.25
_TRIAL_S = 0.5
_SNOOZE_S_MAX = 600.0
_RECEIVERS_MAX = 10_000


@dataclass(slots=True, eq=False)
class _Receiver:
    """An origin of a requester: its recent latency, and when its last snoozed delivery is due."""

    requester: str
    latency_s: float | None = None
    next_s: float = 0.0
    under_way: list[_Request] = field(default_factory=list)

    def record(self, seconds: float) -> None:
        """Record the duration of a request that has ended."""
        before = seconds if self.latency_s is None else self.latency_s
        self.latency_s = (before + seconds) / 2

    def is_slow(self, now_s: float) -> bool:
        """True until it has answered quickly, and while a request to it takes long."""
        return self.expected_s(now_s) >= SLOW_S

    def expected_s(self, now_s: float) -> float:
        """The expected duration of a request."""
        known = SLOW_S if self.latency_s is None else self.latency_s
        return max([known, *(now_s - request.since_s for request in self.under_way)])

    @property
    def is_new(self) -> bool:
        """Whether it has neither answered nor failed its trial."""
        return self.latency_s is None and all(request.trial for request in self.under_way)


@dataclass(slots=True, eq=False)
class _Request:
    receiver: _Receiver
    since_s: float
    trial: bool


class DeliverySlots:
    """The slots of one worker; `at_once` is their number.

    `per_requester` is how many of them one requester may have. 0 means all of them, but one fewer
    while another requester waits.
    """

    def __init__(
        self,
        at_once: int = AT_ONCE,
        *,
        per_requester: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._at_once = at_once
        self._per_requester = per_requester
        self._requester_max = max(1, at_once * 2 // 5)
        self._slow_max = max(1, at_once * 3 // 5)
        self._all_but_one = max(1, at_once - 1)
        self._clock = clock
        self._receivers: OrderedDict[tuple[str, str], _Receiver] = OrderedDict()
        self._under_way: list[_Request] = []
        self._waiting: dict[asyncio.Future[None], _Receiver] = {}

    @asynccontextmanager
    async def slot(self, requester: str, url: str) -> AsyncIterator[None]:
        """Hold a slot for a request to this URL; raises `Snooze` to delay the delivery."""
        receiver = self._receiver(requester, url)
        loop = asyncio.get_running_loop()
        came_s = loop.time()
        while (wait_s := self._wait_s(receiver, loop.time() - came_s)) != 0.0:
            free = loop.create_future()
            self._waiting[free] = receiver
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await free
            finally:
                del self._waiting[free]
        request = _Request(receiver, self._clock(), trial=receiver.is_new)
        self._under_way.append(request)
        receiver.under_way.append(request)
        limit = asyncio.timeout(None)
        trial_end = loop.call_later(_TRIAL_S, self._end_trial, request, limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise self._snooze(receiver, self._clock()) from None
            raise
        finally:
            trial_end.cancel()
            self._under_way.remove(request)
            receiver.under_way.remove(request)
            took_s = self._clock() - request.since_s
            receiver.record(max(took_s, SLOW_S) if limit.expired() else took_s)
            self._wake()

    def _end_trial(self, request: _Request, limit: asyncio.Timeout) -> None:
        """After a trial without an answer the receiver is slow, and needs one of those slots."""
        if not request.trial:
            return
        if self._slow_are_full(request.receiver, self._clock()):
            limit.reschedule(0)
        request.trial = False
        self._wake()  # deliveries that wait for the receiver's first answer

    def _wake(self) -> None:
        for free in self._waiting:
            if not free.done():
                free.set_result(None)

    def _wait_s(self, receiver: _Receiver, waited_s: float) -> float | None:
        """0 if the request may start now, else how long to wait; None until a request ends."""
        now_s = self._clock()
        if self._per_requester and self._is_over_quota(receiver.requester):
            return None
        if receiver.is_new:
            return self._wait_new_s(receiver, waited_s, now_s)
        if receiver.is_slow(now_s):
            if self._slow_are_full(receiver, now_s):
                raise self._snooze(receiver, now_s)
        elif len(receiver.under_way) >= self._all_but_one:
            return None  # leaves one slot for the others, in case the receiver hangs
        elif self._is_over_quota(receiver.requester):
            return None
        return None if len(self._under_way) >= self._at_once else 0.0

    def _wait_new_s(self, receiver: _Receiver, waited_s: float, now_s: float) -> float:
        slow = [each.receiver for each in self._under_way if each.receiver.is_slow(now_s)]
        if receiver.under_way:
            left_s = _NEW_S - waited_s if len(slow) == 1 else 0.0
        else:
            here = (*(each.receiver for each in self._under_way), *self._waiting.values())
            quick = any(not each.is_slow(now_s) for each in here)
            theirs = sum(each.requester == receiver.requester for each in slow)
            free = len(self._under_way) < self._at_once
            room = len(slow) < (self._all_but_one if quick else self._at_once)
            if free and room and theirs < self._all_but_one:
                return 0.0
            left_s = 2 * _TRIAL_S - waited_s
        if left_s <= 0:
            raise Snooze(_TRIAL_S * random.uniform(1, 1.5), "its receiver is not known yet")
        return left_s

    def _is_over_quota(self, requester: str) -> bool:
        """Whether a requester has as many slots as it may have."""
        mine = sum(each.receiver.requester == requester for each in self._under_way)
        if self._per_requester:
            return mine >= self._per_requester
        others = any(each.requester != requester for each in self._waiting.values())
        return others and mine >= self._all_but_one

    def _slow_are_full(self, receiver: _Receiver, now_s: float) -> bool:
        """Whether no slot is left for slow receivers, of this requester or of all."""
        slow = [
            each.receiver.requester
            for each in self._under_way
            if not each.trial and each.receiver.is_slow(now_s)
        ]
        return slow.count(receiver.requester) >= self._requester_max or len(slow) >= self._slow_max

    def _snooze(self, receiver: _Receiver, now_s: float) -> Snooze:
        step_s = receiver.expected_s(now_s) / self._requester_max
        latest_s = now_s + _SNOOZE_S_MAX
        receiver.next_s = min(max(receiver.next_s, now_s) + step_s, latest_s)
        return Snooze(receiver.next_s - now_s, "its receiver is slow to answer")

    def _receiver(self, requester: str, url: str) -> _Receiver:
        key = (requester, read_target(url).origin)
        found = self._receivers.get(key)
        if found is None:
            found = self._receivers[key] = _Receiver(requester)
            if len(self._receivers) > _RECEIVERS_MAX:
                self._receivers.popitem(last=False)
        self._receivers.move_to_end(key)
        return found
