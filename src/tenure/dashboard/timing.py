"""Durations gathered on a log scale, and what is read off them: quantiles and heat map bands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

_BASE = math.log(1.15)  # a bucket is 15 % wide, which bounds the error of a quantile
BANDS_MS = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)


def bucket_of(ms: float) -> int:
    """The bucket of a duration."""
    return int(math.log(max(ms, 0) + 1) / _BASE)


def bucket_ms(bucket: int) -> float:
    """The duration in the middle of a bucket.

    >>> all(abs(bucket_ms(bucket_of(ms)) - ms) <= 0.08 * ms + 1 for ms in (1, 17, 900, 86_400_000))
    True
    """
    return math.exp((bucket + 0.5) * _BASE) - 1


def quantiles(counts: Iterable[Counter[int]], shares: tuple[float, ...]) -> list[float | None]:
    """The durations below which these shares lie; None where nothing was gathered."""
    total: Counter[int] = Counter()
    for part in counts:
        total.update(part)
    size = sum(total.values())
    if not size:
        return [None] * len(shares)
    found: list[float | None] = []
    for share in shares:
        left = share * size
        for bucket in sorted(total):
            left -= total[bucket]
            if left <= 0:
                found.append(bucket_ms(bucket))
                break
    return found


def band_of(bucket: int) -> int:
    """The row of the heat map in which a bucket lies."""
    ms = bucket_ms(bucket)
    return sum(ms > bound for bound in BANDS_MS)
