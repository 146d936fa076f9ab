"""How the plane learns which jobs are next. Who gets one, the database decides in any case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tenure.core.lease import Lease
from tenure.sql.engine import QueueListener


class Taken(NamedTuple):
    """What a look brought: leases, and in how many milliseconds a job is due (0: none known)."""

    leases: list[Lease]
    due_in_ms: int = 0


class Transport(Protocol):
    """Carries the streams' messages."""

    async def take(self, stream: str, limit: int, worker_id: str, token: str) -> Taken:
        """Leases on the next jobs of a stream: lease, attempt and state in one transaction."""

    async def done(self, stream: str, message_ids: Sequence[str]) -> None:
        """These messages have had their effect (P-14): the transport may forget them."""

    async def sent_back(self, stream: str) -> None:
        """A job of the stream waits again."""

    async def upkeep(self) -> None:
        """Bring back what got lost on the way."""

    def bell(self, stream: str) -> QueueListener:
        """Rings when there may be something in a stream."""

    async def close(self) -> None:
        """Let go of connections."""
