"""ULIDs: 48 bits of milliseconds and 80 of chance, in 26 characters that sort by time.

Within one process they never go backwards: ids of the same millisecond count up, so that publish
order is id order.
"""

from __future__ import annotations

import secrets
import threading
import time

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
_RANDOM_BITS = 80
_lock = threading.Lock()
_last = 0


def new_ulid() -> str:
    """The next id.

    >>> first, second = new_ulid(), new_ulid()
    >>> len(first), first < second
    (26, True)
    """
    global _last  # noqa: PLW0603  # one clock for the process
    with _lock:
        value = (time.time_ns() // 1_000_000) << _RANDOM_BITS
        if value >> _RANDOM_BITS > _last >> _RANDOM_BITS:
            value |= secrets.randbits(_RANDOM_BITS - 1)  # the top bit is room to count up
        else:
            value = _last + 1 + secrets.randbits(32)
        _last = value
    return _text(value)


def _text(value: int) -> str:
    # Thirteen pairs of five bits each: 130 bits, of which the top two are always zero.
    return "".join([_PAIRS[(value >> shift) & 1023] for shift in range(120, -1, -10)])
