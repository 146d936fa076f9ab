"""How much one key may ask for, and how often a stranger may show a wrong one."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import structlog

from leasehold.gateway.problems import Problem
from leasehold.gateway.proxies import whereabouts

_log = structlog.get_logger("leasehold.gateway")

_BUCKETS_MAX = 10_000


class RateLimit:
    """`per_s` requests a second on average and `burst` at once, for each requester by itself.

    It counts in this process: with N gateways a key gets N times as much. 0 is no limit. The
    buckets that were used last are kept, so that requesters without number cost no memory.
    """

    def __init__(
        self,
        per_s: float,
        burst: int = 0,
        *,
        code: str = "rate_limited",
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_s = per_s
        self._code = code
        self._burst = burst or max(1, math.ceil(per_s))
        self._clock_s = clock_s
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, requester: str) -> None:
        """Take one token, or `Problem` 429 that says when there is one."""
        if not self._per_s:
            return
        now = self._clock_s()
        tokens, since = self._buckets.get(requester, (float(self._burst), now))
        tokens = min(self._burst, tokens + (now - since) * self._per_s)
        if tokens < 1:
            wait_s = math.ceil((1 - tokens) / self._per_s)
            raise Problem(self._code, retry_after_s=max(1, wait_s))
        self._buckets[requester] = (tokens - 1, now)
        self._buckets.move_to_end(requester)
        if len(self._buckets) > _BUCKETS_MAX:
            self._buckets.popitem(last=False)


class FailedLogins:
    """Logs who showed a wrong key, and limits it by address and by the key that was meant.

    Only failures are counted and only failures are refused: a right key is always let in, so a
    stranger can lock out neither its owner nor others behind the same address. That is safe since
    a secret of 256 random bits cannot be guessed at any rate.
    """

    def __init__(self, per_min: int, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        rate = per_min / 60
        self._addresses = RateLimit(rate, per_min, code="login_limited", clock_s=clock_s)
        self._keys = RateLimit(rate, per_min, code="login_limited", clock_s=clock_s)
        self._lines = RateLimit(1 / 60, 1, clock_s=clock_s)

    def note(self, address: str, key_id: str, way: str) -> None:
        """Write one failure to the log, or `Problem` 429 when there were too many of late."""
        origin = whereabouts(address)
        try:
            self._addresses.take(origin)
            if key_id:
                self._keys.take(key_id)
        except Problem:
            self._note_limited(origin, address, key_id, way)
            raise
        _log.warning("login_failed", address=address, key=key_id, way=way)

    def _note_limited(self, origin: str, address: str, key_id: str, way: str) -> None:
        """Once a minute and address: a flood of failures does not become a flood of lines."""
        with suppress(Problem):
            self._lines.take(origin)
            _log.warning("login_limited", address=address, key=key_id, way=way)


class StreamLimit:
    """Open event streams by requester; the anonymous local caller is not counted out."""

    def __init__(self, per_key: int) -> None:
        self._per_key = per_key
        self._open: Counter[str] = Counter()

    @contextmanager
    def slot(self, requester: str) -> Iterator[None]:
        """Hold one place while a stream is open, or `Problem` 429."""
        if requester and self._open[requester] >= self._per_key:
            raise Problem(
                "too_many_streams",
                f"at most {self._per_key} event streams may be open with one key",
                retry_after_s=1,
            )
        self._open[requester] += 1
        try:
            yield
        finally:
            self._open[requester] -= 1
            if not self._open[requester]:
                del self._open[requester]
