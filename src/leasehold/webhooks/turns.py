"""How many deliveries go out at once, and how few of them to slow receivers.

A worker makes a few requests at once (contract section 12). One receiver that takes long to answer
would soon hold all of them, and all other events would wait for it. Therefore a receiver (an origin
of a requester) is slow until it has answered within a second, and slow ones share a part of the
requests: of five, one receiver gets two, one requester three, and all of them together four.

A delivery beyond that does not wait here, where it would hold a lease and a slot. It is put off to
the time at which its receiver should be free; each gets a time of its own, so that they come back
one by one. Deliveries to quick receivers wait here for a free place, and those to a new receiver
for its first answer, up to a quarter of a second.

A receiver that this worker has not met may be quick. While the slow ones have their share, one such
receiver at a time is tried in a place that is left to the quick ones, for half a second: if there
is no answer by then, the request is given up, and the receiver is known to be slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from leasehold.core.outcome import Snooze
from leasehold.egress.target import read_target

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

    def is_new(self, now_s: float) -> bool:
        """Its first answer will tell soon."""
        young = all(now_s - request.since_s < _NEW_S for request in self.under_way)
        return self.latency_s is None and young


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
        self._wanting: Counter[str] = Counter()
        self._receiver_max = max(1, at_once // 2)
        self._requester_max = max(1, at_once - 2)
        self._slow_max = max(1, at_once - 1)
        self._clock = clock
        self._receivers: OrderedDict[tuple[str, str], _Receiver] = OrderedDict()
        self._under_way: list[_Request] = []
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def turn(self, requester: str, url: str) -> AsyncIterator[None]:
        """A request to this URL may be made within; raises `Snooze` when it is put off."""
        receiver = self._receiver(requester, url)
        loop = asyncio.get_running_loop()
        patient_until_s = loop.time() + _NEW_S
        self._wanting[requester] += 1
        try:
            while (wait_s := self._wait_s(receiver, patient_until_s - loop.time())) != 0.0:
                free = loop.create_future()
                self._waiting.append(free)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(free, wait_s)
        finally:
            self._wanting[requester] -= 1
            self._wanting += Counter()  # without those that are 0
        now_s = self._clock()
        request = _Request(receiver, now_s, trial=self._has_its_share(receiver, now_s))
        self._under_way.append(request)
        receiver.under_way.append(request)
        limit = asyncio.timeout(_TRIAL_S if request.trial else None)
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise self._put_off(receiver, self._clock()) from None
            raise
        finally:
            self._under_way.remove(request)
            receiver.under_way.remove(request)
            took_s = self._clock() - request.since_s
            receiver.took(max(took_s, SLOW_S) if limit.expired() else took_s)
            waiting, self._waiting = self._waiting, []
            for free in waiting:
                if not free.done():
                    free.set_result(None)

    def _wait_s(self, receiver: _Receiver, patience_s: float) -> float | None:
        """0 when it may go now; else how long to wait here, None until another request ends."""
        now_s = self._clock()
        full = len(self._under_way) >= self._at_once
        if self._has_its_share(receiver, now_s):
            if not receiver.is_new(now_s):
                raise self._put_off(receiver, now_s)
            if full or receiver.under_way or any(each.trial for each in self._under_way):
                if patience_s <= 0:
                    raise self._put_off(receiver, now_s)
                return patience_s
        elif not receiver.is_slow(now_s) and len(receiver.under_way) >= self._slow_max:
            return None  # were it to hang all at once, one place is left for the others
        elif self._is_over_quota(receiver.requester):
            return None
        return None if full else 0.0

    def _is_over_quota(self, requester: str) -> bool:
        """Whether a requester has all the requests that it may have while others wait."""
        mine = sum(each.receiver.requester == requester for each in self._under_way)
        if self._per_requester:
            return mine >= self._per_requester
        others = sum(self._wanting.values()) - self._wanting[requester]
        return others > 0 and mine >= max(1, self._at_once - 1)

    def _has_its_share(self, receiver: _Receiver, now_s: float) -> bool:
        """It is slow, and the slow ones have all that they get: it, its requester, or all."""
        if not receiver.is_slow(now_s):
            return False
        slow = [
            each.receiver.requester
            for each in self._under_way
            if not each.trial and each.receiver.is_slow(now_s)
        ]
        return (
            len(receiver.under_way) >= self._receiver_max
            or slow.count(receiver.requester) >= self._requester_max
            or len(slow) >= self._slow_max
        )

    def _put_off(self, receiver: _Receiver, now_s: float) -> Snooze:
        step_s = receiver.expected_s(now_s) / self._receiver_max
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
