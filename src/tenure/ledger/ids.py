"""Job ids whose order is their age, so that a table grows at one end of its index."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator


def uuid7() -> str:
    """A version 7 UUID: 48 bits of milliseconds, then chance."""
    return next(uuid7s(1))


def uuid7s(count: int) -> Iterator[str]:
    """As many of them, of one moment and in rising order: an index takes them at one place."""
    time_h = f"{time.time_ns() // 1_000_000:012x}"
    head = f"{time_h[:8]}-{time_h[8:]}-7"
    chance = os.urandom(10 * count).hex()
    tails = [
        f"{chance[at : at + 3]}-{_VARIANT[chance[at + 3]]}{chance[at + 4 : at + 7]}"
        f"-{chance[at + 7 : at + 19]}"
        for at in range(0, len(chance), 20)
    ]
    tails.sort()
    return (head + tail for tail in tails)


_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
