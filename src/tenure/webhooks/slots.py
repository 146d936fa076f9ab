"""How many deliveries go out at once, and how few of them to slow receivers.

A worker makes a few requests at once (contract section 12). One receiver that takes long to answer
would soon hold all of them, and all other events would wait for it. Therefore a receiver (an origin
of a requester) that does not answer within a second is slow, and slow ones share a part of the
requests: of five, one requester gets two, and all of them together three.

A delivery beyond that does not wait here, where it would hold a lease and a slot. It is put off to
the time at which its receiver should be free; each gets a time of its own, so that they come back
one by one. Deliveries to quick receivers wait here for a free place.

A receiver that this worker has not met may be quick or slow; after a restart all of them are new.
New ones are tried side by side, with one request each, in the places that the slow ones leave: all
but one for one requester, and all but one while there are deliveries to quick receivers. A receiver
that has not answered after half a second counts as slow. Its request goes on if it is within the
share of the slow ones, else it is given up. Other deliveries to a new receiver wait for its first
answer, up to a quarter of a second; while others are slow or tried, they come back soon instead.
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
_PUT_OFF_S_MAX = 600.0
_RECEIVERS_MAX = 10_000


@dataclass(slots=True, eq=False)
class _Receiver:
    """A requester's origin: how long it took of late, and when a put-off delivery comes back."""

    requester: str
    latency_s: float | None = None
    next_s: float = 0.0
    under_way: list[_Request] = field(default_factory=list)

    def took(self, seconds: float) -> None:
        """A request to it has ended."""
        before = seconds if self.latency_s is None else self.latency_s
        self.latency_s = (before + seconds) / 2

    def is_slow(self, now_s: float) -> bool:
        """Until it has been seen to be quick, and while a request to it takes long."""
        return self.expected_s(now_s) >= SLOW_S

    def expected_s(self, now_s: float) -> float:
        """How long a request to it takes, as far as is known."""
        known = SLOW_S if self.latency_s is None else self.latency_s
        return max([known, *(now_s - request.since_s for request in self.under_way)])

    @property
    def is_new(self) -> bool:
        """It has neither answered nor been found to be slow."""
        return self.latency_s is None and all(request.trial for request in self.under_way)


@dataclass(slots=True, eq=False)
class _Request:
    receiver: _Receiver
    since_s: float
    trial: bool


class Turns:
    """The requests of one worker; `at_once` is how many there may be.

    `per_requester` is how many of them one requester may have; 0 is all of them, and all but one
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
    async def turn(self, requester: str, url: str) -> AsyncIterator[None]:
        """A request to this URL may be made within; raises `Snooze` when it is put off."""
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
        judging = loop.call_later(_TRIAL_S, self._judge, request, limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise self._put_off(receiver, self._clock()) from None
            raise
        finally:
            judging.cancel()
            self._under_way.remove(request)
            receiver.under_way.remove(request)
            took_s = self._clock() - request.since_s
            receiver.took(max(took_s, SLOW_S) if limit.expired() else took_s)
            self._wake()

    def _judge(self, request: _Request, limit: asyncio.Timeout) -> None:
        """A trial without an answer: the receiver is slow, and the request is one of its share."""
        if not request.trial:
            return
        if self._has_its_share(request.receiver, self._clock()):
            limit.reschedule(0)
        request.trial = False
        self._wake()  # who waits for the receiver's first answer does so in vain

    def _wake(self) -> None:
        for free in self._waiting:
            if not free.done():
                free.set_result(None)

    def _wait_s(self, receiver: _Receiver, waited_s: float) -> float | None:
        """0 when it may go now; else how long to wait here, None until another request ends."""
        now_s = self._clock()
        if self._per_requester and self._is_over_quota(receiver.requester):
            return None
        if receiver.is_new:
            return self._wait_new_s(receiver, waited_s, now_s)
        if receiver.is_slow(now_s):
            if self._has_its_share(receiver, now_s):
                raise self._put_off(receiver, now_s)
        elif len(receiver.under_way) >= self._all_but_one:
            return None  # were it to hang all at once, one place is left for the others
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
        """Whether a requester has all the requests that it may have while others wait."""
        mine = sum(each.receiver.requester == requester for each in self._under_way)
        if self._per_requester:
            return mine >= self._per_requester
        others = any(each.requester != requester for each in self._waiting.values())
        return others and mine >= self._all_but_one

    def _has_its_share(self, receiver: _Receiver, now_s: float) -> bool:
        """The slow ones have all that they get: its requester's, or all."""
        slow = [
            each.receiver.requester
            for each in self._under_way
            if not each.trial and each.receiver.is_slow(now_s)
        ]
        return slow.count(receiver.requester) >= self._requester_max or len(slow) >= self._slow_max

    def _put_off(self, receiver: _Receiver, now_s: float) -> Snooze:
        step_s = receiver.expected_s(now_s) / self._requester_max
        latest_s = now_s + _PUT_OFF_S_MAX
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
