"""What a receiver's answer asks for (section 5 and 8 of the contract), as a pure function.

2xx is delivered. Every other answer is tried again, a 404 or a redirect like a 500: a receiver that
is being moved or deployed gives such answers for a while. 429 waits in a larger bucket, and a
Retry-After is respected within reason. 410 alone says that nothing more is wanted: dead letter,
from where it can be delivered again by hand, as what was tried too often is.
"""

from __future__ import annotations

import email.utils
from collections.abc import Mapping
from dataclasses import dataclass

from tenure.core.outcome import Fatal, Retry, Signal
from tenure.core.retry import RetryPolicy, delay_ms, exponential

RETRY = exponential(5_000, factor=4.0, max_attempts=10, delay_ms_max=6 * 3_600_000)
"""5 s, 20 s, 80 s, 5 min, 21 min, 85 min, 6 h ...: about a day in all."""
CROWDED = exponential(60_000, factor=4.0, max_attempts=10, delay_ms_max=6 * 3_600_000)
"""For 429: begins with a minute."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to wait: after an ordinary failure, and (in a larger bucket) after 429."""

    ordinary: RetryPolicy = RETRY
    crowded: RetryPolicy = CROWDED


PACE = Pace()

_RETRY_AFTER_MS_MAX = 3_600_000
_GONE, _CROWDED, _OK, _REDIRECT = 410, 429, 200, 300


def signal_of(
    status: int,
    headers: Mapping[str, str],
    *,
    attempt: int,
    chance: float,
    now_s: float,
    pace: Pace = PACE,
) -> Signal | None:
    """None when delivered, else how the attempt ends."""
    if _OK <= status < _REDIRECT:
        return None
    if status == _CROWDED:
        return _again(pace.crowded, "429", headers, attempt, chance, now_s)
    if status == _GONE:
        return Fatal("the receiver answered 410: it wants no more of these", code="http_410")
    return _again(pace.ordinary, str(status), headers, attempt, chance, now_s)


def retry_after_ms(value: str, now_s: float) -> int:
    """Milliseconds by a Retry-After header (a number or a date); 0 without a usable one.

    >>> retry_after_ms("7", 0), retry_after_ms("Thu, 01 Jan 1970 00:00:30 GMT", 10.0)
    (7000, 20000)
    >>> retry_after_ms("soon", 0), retry_after_ms("999999", 0), retry_after_ms("nan", 0)
    (0, 3600000, 0)
    """
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now_s
        except (ValueError, OverflowError):
            return 0
    if not seconds > 0:
        return 0
    return round(min(seconds * 1000, _RETRY_AFTER_MS_MAX))


def _again(
    policy: RetryPolicy,
    status: str,
    headers: Mapping[str, str],
    attempt: int,
    chance: float,
    now_s: float,
) -> Retry:
    wait_ms = max(
        delay_ms(policy, attempt, chance), retry_after_ms(headers.get("retry-after", ""), now_s)
    )
    return Retry(wait_ms / 1000, f"the receiver answered {status}", code=f"http_{status}")
