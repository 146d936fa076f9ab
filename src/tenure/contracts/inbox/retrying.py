"""When a failed attempt runs again (contract section 5), decided from the failure's code alone.

A code that is, or ends in, an HTTP status (`503`, `http_503`) falls into that status's class:

    busy        423, 500, 502, 503, 504     exponential with jitter
    throttled   429                         the same from a larger first step: at once slower
    refused     401, 403                    credentials: the worker refreshes them and counts it
                                            apart; here they are tried again like `busy`
    hopeless    every other 4xx             trying again changes nothing: dead letter

Any other failure says itself whether it may be tried again.
"""

from __future__ import annotations

import re
from typing import Literal

from tenure.core.outcome import Failure
from tenure.core.retry import delay_ms, exponential

RetryClass = Literal["busy", "throttled", "refused", "hopeless", "plain"]

BUSY = frozenset({423, 500, 502, 503, 504})
THROTTLED = frozenset({429})
REFUSED = frozenset({401, 403})
THROTTLED_FACTOR = 8

_STATUS = re.compile(r"(?:^|[^0-9])([1-5][0-9]{2})$")


def http_status(code: str) -> int:
    """The HTTP status that an error code ends in, 0 for none.

    >>> http_status("http_503"), http_status("404"), http_status("Timeout"), http_status("E1503")
    (503, 404, 0, 0)
    """
    match = _STATUS.search(code)
    return int(match[1]) if match else 0


def retry_class(failure: Failure | None) -> RetryClass:
    """The class of a failure."""
    status = http_status(failure.code) if failure else 0
    if status in BUSY:
        return "busy"
    if status in THROTTLED:
        return "throttled"
    if status in REFUSED:
        return "refused"
    return "hopeless" if 400 <= status < 500 else "plain"


def backoff(
    failure: Failure | None, attempt: int, first_ms: int, chance: float
) -> tuple[int, bool]:
    """After how many milliseconds attempt `attempt` is followed by the next, and if at all."""
    kind = retry_class(failure)
    if kind == "hopeless" or (kind == "plain" and failure is not None and not failure.retryable):
        return 0, False
    step_ms = first_ms * THROTTLED_FACTOR if kind == "throttled" else first_ms
    return delay_ms(exponential(step_ms, jitter="equal"), attempt, chance), True
