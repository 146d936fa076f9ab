"""How many deliveries go out at once, and how few of them to slow receivers.

A worker makes a few requests at once (contract section 12). One receiver that takes long to answer
would soon hold all of them, and all other events would wait for it. Therefore a receiver is slow
until it has answered within a second, and slow ones share a part of the requests: of five, one
receiver gets two, one requester three, and all of them together four.

A delivery beyond that does not wait here, where it would hold a lease and a slot. It is put off to
the time at which its receiver should be free; each gets a time of its own, so that they come back
one by one. Deliveries to quick receivers wait here for a free place, and those to a new receiver
for its first answer, up to half a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from leasehold.core.outcome import Snooze

AT_ONCE = 5
SLOW_S = 1.0
_NEW_S = 0.5
_PUT_OFF_S_MAX = 30.0
_RECEIVERS_MAX = 10_000


@dataclass(slots=True, eq=False)
class _Receiver:
    """A requester's endpoint: how long it took of late, and when a put-off delivery comes back."""

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


@dataclass(slots=True, eq=False)
class _Request:
    receiver: _Receiver
    since_s: float


class Turns:
    """The requests of one worker; `at_once` is how many there may be."""

    def __init__(
        self, at_once: int = AT_ONCE, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._at_once = at_once
        self._receiver_max = max(1, at_once // 2)
        self._requester_max = max(1, at_once - 2)
        self._slow_max = max(1, at_once - 1)
        self._clock = clock
        self._receivers: OrderedDict[tuple[str, str], _Receiver] = OrderedDict()
        self._under_way: list[_Request] = []
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def turn(self, requester: str, url: str) -> AsyncIterator[None]:
        """A request to this endpoint may be made within; raises `Snooze` when it is put off."""
        receiver = self._receiver(requester, url)
        while (wait_s := self._wait_s(receiver)) != 0.0:
            free = asyncio.get_running_loop().create_future()
            self._waiting.append(free)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(free, wait_s)
        request = _Request(receiver, self._clock())
        self._under_way.append(request)
        receiver.under_way.append(request)
        try:
            yield
        finally:
            self._under_way.remove(request)
            receiver.under_way.remove(request)
            receiver.took(self._clock() - request.since_s)
            waiting, self._waiting = self._waiting, []
            for free in waiting:
                if not free.done():
                    free.set_result(None)

    def _wait_s(self, receiver: _Receiver) -> float | None:
        """0 when it may go now; else how long to wait here, None until another request ends."""
        now_s = self._clock()
        if receiver.is_slow(now_s):
            slow = [each for each in self._under_way if each.receiver.is_slow(now_s)]
            of_requester = sum(each.receiver.requester == receiver.requester for each in slow)
            if len(receiver.under_way) >= self._receiver_max:
                new_for_s = now_s - receiver.under_way[0].since_s
                if receiver.latency_s is None and new_for_s < _NEW_S:
                    return _NEW_S - new_for_s  # its first answer will tell
                raise self._put_off(receiver, now_s)
            if of_requester >= self._requester_max or len(slow) >= self._slow_max:
                raise self._put_off(receiver, now_s)
        elif len(receiver.under_way) >= self._slow_max:
            return None  # were it to hang all at once, one place is left for the others
        return 0.0 if len(self._under_way) < self._at_once else None

    def _put_off(self, receiver: _Receiver, now_s: float) -> Snooze:
        step_s = receiver.expected_s(now_s) / self._receiver_max
        latest_s = now_s + _PUT_OFF_S_MAX
        receiver.next_s = min(max(receiver.next_s, now_s) + step_s, latest_s)
        return Snooze(receiver.next_s - now_s, "its receiver is slow to answer")

    def _receiver(self, requester: str, url: str) -> _Receiver:
        key = (requester, url.partition("?")[0])
        found = self._receivers.get(key)
        if found is None:
            found = self._receivers[key] = _Receiver(requester)
            if len(self._receivers) > _RECEIVERS_MAX:
                self._receivers.popitem(last=False)
        self._receivers.move_to_end(key)
        return found
