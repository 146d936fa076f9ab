"""Jittered, growing pauses between tries against a store that does not answer."""

from __future__ import annotations

from random import Random

from tenure.core.retry import RetryPolicy, delay_ms


class Backoff:
    """Each `pause_s` is longer than the one before, up to a limit, until `reset`."""

    __slots__ = ("_policy", "_rng", "tries")

    def __init__(self, rng: Random, first_ms: int, ms_max: int) -> None:
        self._rng = rng
        self._policy = RetryPolicy(delay_ms=first_ms, delay_ms_max=ms_max, jitter="equal")
        self.tries = 0

    def pause_s(self) -> float:
        """How long to wait before the next try."""
        self.tries += 1
        return delay_ms(self._policy, self.tries, self._rng.random()) / 1000

    def reset(self) -> None:
        """It worked: begin with the shortest pause again."""
        self.tries = 0
