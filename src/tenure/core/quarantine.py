"""Records that a queue could not read, and how it tells its worker about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A record that could not be read and was set aside."""

    job_id: str
    reason: str


@runtime_checkable
class Quarantining(Protocol):
    """A queue that sets unreadable records aside instead of handing them out."""

    def take_quarantined(self) -> list[Quarantined]:
        """What was set aside since the last call."""
