"""How much one key may ask for: a token bucket for requests, a count for open event streams."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from leasehold.gateway.problems import Problem

_BUCKETS_MAX = 10_000


class RateLimit:
    """`per_s` requests a second on average and `burst` at once, for each requester by itself.

    It counts in this process: with N gateways a key gets N times as much. 0 is no limit.
    """

    def __init__(
        self, per_s: float, burst: int = 0, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._burst = burst or max(1, math.ceil(per_s))
        self._clock_s = clock_s
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, requester: str) -> None:
        """Take one token, or `Problem` 429 that says when there is one."""
        if not self._per_s:
            return
        now = self._clock_s()
        tokens, since = self._buckets.get(requester, (float(self._burst), now))
        tokens = min(self._burst, tokens + (now - since) * self._per_s)
        if tokens < 1:
            wait_s = math.ceil((1 - tokens) / self._per_s)
            raise Problem("rate_limited", retry_after_s=max(1, wait_s))
        if len(self._buckets) >= _BUCKETS_MAX:
            self._forget(now)
        self._buckets[requester] = (tokens - 1, now)

    def _forget(self, now: float) -> None:
        """Drop buckets that are full again: they say nothing that a new one would not."""
        self._buckets = {
            name: (tokens, since)
            for name, (tokens, since) in self._buckets.items()
            if tokens + (now - since) * self._per_s < self._burst
        }


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
