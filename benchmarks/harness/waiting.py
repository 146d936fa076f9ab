"""Waiting for what another process does: looking again, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], bool], *, within_s: float, every_s: float = 0.01) -> bool:
    """Whether it came to hold in time; returns as soon as it does.

    `every_s` is how often it looks: often enough for the figure, seldom enough not to be in it.
    """
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True
