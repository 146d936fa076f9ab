"""Job ids whose order is their age, so that a table grows at one end of its index."""

from __future__ import annotations

import os
import time
from uuid import UUID


def uuid7() -> str:
    """A version 7 UUID: 48 bits of milliseconds, then chance."""
    head = (time.time_ns() // 1_000_000).to_bytes(6, "big")
    body = bytearray(head + os.urandom(10))
    body[6] = body[6] & 0x0F | 0x70
    body[8] = body[8] & 0x3F | 0x80
    return str(UUID(bytes=bytes(body)))
