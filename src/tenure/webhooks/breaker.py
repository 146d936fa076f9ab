"""Keeps one dead receiver from holding up the deliveries to all others.

Five failures in a row open the breaker of an origin: for a while (10 s, doubling to 5 min) its
events are put off without a connection, but for one that tries. A success closes it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_PAUSE_S_MAX = 300.0
_ORIGINS_MAX = 10_000


@dataclass(slots=True)
class _State:
    pause_s: float
    failures: int = 0
    until_s: float = 0.0


class Breaker:
    """What is known of the origins that failed of late."""

    def __init__(self, *, failures_min: int = 5, pause_s: float = 10.0) -> None:
        self._failures_min = failures_min
        self._pause_s = pause_s
        self._states: OrderedDict[str, _State] = OrderedDict()

    def wait_s(self, origin: str, now_s: float) -> float:
        """0 when a delivery may be tried now; the first to ask after a pause is the one to try."""
        state = self._states.get(origin)
        if state is None or state.failures < self._failures_min:
            return 0.0
        if now_s < state.until_s:
            return state.until_s - now_s
        state.until_s = now_s + state.pause_s  # the others wait for what this one finds
        return 0.0

    def untried(self, origin: str, now_s: float) -> None:
        """The delivery that was let through was put off for another reason: the next one tries."""
        state = self._states.get(origin)
        if state is not None and state.failures >= self._failures_min:
            state.until_s = now_s

    def worked(self, origin: str) -> None:
        """It answered."""
        self._states.pop(origin, None)

    def failed(self, origin: str, now_s: float) -> None:
        """It did not answer, or with an error of its own."""
        state = self._states.setdefault(origin, _State(self._pause_s))
        state.failures += 1
        if state.failures > self._failures_min:
            state.pause_s = min(state.pause_s * 2, _PAUSE_S_MAX)
        state.until_s = now_s + state.pause_s
        self._states.move_to_end(origin)
        if len(self._states) > _ORIGINS_MAX:
            self._states.popitem(last=False)
