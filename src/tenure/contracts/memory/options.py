"""What a `memory://name?...` URL may say."""

from __future__ import annotations

import msgspec

DAY_MS = 86_400_000


class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one memory queue; two URLs of the same name may not contradict each other.

    `depth_max` 0 means no limit. `retry_delay_ms` is the wait before a run that the store itself
    decided on (outcome "fail"). `keep_ms` is how long a finished job stays readable.
    """

    lease_ms: int = 15_000
    max_attempts: int = 3
    depth_max: int = 0
    retry_delay_ms: int = 0
    keep_ms: int = DAY_MS
    journal_events_max: int = 1_000_000

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is at least {least}, not {getattr(self, name)}")


_LEAST = {
    "lease_ms": 1,
    "max_attempts": 1,
    "depth_max": 0,
    "retry_delay_ms": 0,
    "keep_ms": 0,
    "journal_events_max": 1,
}
