"""A contract's own state names, by the suite's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """The contract's own state names."""

    waiting: str
    running: str
    done: str
    failed: str
    cancelled: str

    def of(self, *names: str) -> tuple[str, ...]:
        """The contract's words for ours."""
        return tuple(getattr(self, name) for name in names)
