"""Job ids whose order is their age, so that a table grows at one end of its index."""

from __future__ import annotations

import os
import time


def uuid7() -> str:
    """A version 7 UUID: 48 bits of milliseconds, then chance."""
    time_h = f"{time.time_ns() // 1_000_000:012x}"
    h = os.urandom(10).hex()
    variant = "89ab"[int(h[3], 16) & 3]
    return f"{time_h[:8]}-{time_h[8:]}-7{h[:3]}-{variant}{h[4:7]}-{h[7:19]}"
