"""The embedded transport: a job's row is its own message, and the database keeps the order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from tenure.contracts.plane.transport import Taken
from tenure.contracts.plane.words import queue_of
from tenure.core.job import short_hash
from tenure.core.lease import Lease
from tenure.ledger.engine import PLANE, Bell, Engine, Row
from tenure.ledger.settings import BoxSettings
from tenure.ledger.unreadable import why_unreadable
from tenure.ledger.upkeeping import Upkeeping
from tenure.store.gathering import Gathering

# PostgreSQL leaves dead entries at the head of a line while somebody keeps an old transaction open:
# a stream that was full begins where the last claim stopped, and at the head again every second.
_HEAD = (-(2**31), -1)
_HEAD_AGAIN_S = 1.0
_LOOK_EVERY_S = 0.05
_ASKERS_MAX = 100


class _Place:
    """Where the next look at a stream begins."""

    __slots__ = ("begins", "head_s", "looked_s")

    def __init__(self) -> None:
        self.begins = _HEAD
        self.head_s = self.looked_s = float("-inf")


class Asker(NamedTuple):
    """Somebody who asks for leases."""

    worker_id: str
    token: str
    limit: int


class RowTransport:
    """Claims by the rows themselves; those that come at the same time share one transaction."""

    def __init__(
        self, engine: Engine, boxes: Mapping[str, BoxSettings], chores: Mapping[str, Upkeeping]
    ) -> None:
        self._engine = engine
        self._boxes = boxes
        self._chores = chores
        self._places = {stream: _Place() for stream in boxes}
        self._gathered: dict[str, Gathering[Asker, Taken]] = {
            stream: Gathering(
                partial(self._take, stream),
                items_max=_ASKERS_MAX,
                calls_max=calls_max(engine),
                weigh=lambda asker: asker.limit,
            )
            for stream in boxes
        }

    async def take(self, stream: str, limit: int, worker_id: str, token: str) -> Taken:
        (taken,) = await self._gathered[stream]([Asker(worker_id, token, limit)])
        return taken

    async def _take(self, stream: str, askers: list[Asker]) -> list[Taken]:
        place, now = self._places[stream], asyncio.get_running_loop().time()
        if now - place.head_s > _HEAD_AGAIN_S:
            place.begins = _HEAD
        look = now - place.looked_s > _LOOK_EVERY_S or place.begins == _HEAD
        if look:
            place.looked_s = now
        rows = await self._ask(stream, askers, look=look)
        if rows[0]["overdue"]:
            await self._chores[stream].due()
            place.begins = _HEAD
            rows = await self._ask(stream, askers, look=False)
        if rows[0]["job_id"] is None and place.begins != _HEAD:
            place.begins = _HEAD  # what was sent back stands before where the last claim stopped
            rows = await self._ask(stream, askers, look=True)
        return self._dealt(stream, rows, askers)

    async def done(self, stream: str, message_ids: Sequence[str]) -> None:
        """The row tells it already."""

    async def sent_back(self, stream: str) -> None:
        self._places[stream].begins = _HEAD

    async def upkeep(self) -> None:
        """Nothing can get lost: there is one place."""

    def bell(self, stream: str) -> Bell:
        return self._engine.bell(queue_of(stream))

    async def close(self) -> None:
        """The connections belong to the plane."""

    async def _ask(self, stream: str, askers: list[Asker], *, look: bool) -> Sequence[Row]:
        place = self._places[stream]
        if place.begins == _HEAD:
            place.head_s = asyncio.get_running_loop().time()
        return await self._engine.run(
            PLANE,
            "plane_claim",
            [(each.worker_id, short_hash(each.token.encode()), each.limit) for each in askers],
            queue=queue_of(stream),
            lease_ms=self._boxes[stream].lease_ms,
            look=look,
            from_priority=place.begins[0],
            from_seq=place.begins[1],
        )

    def _dealt(self, stream: str, rows: Sequence[Row], askers: list[Asker]) -> list[Taken]:
        """To each asker what it was given."""
        place, first = self._places[stream], rows[0]
        due_in_ms = max(1, first["next_due_ms"] - first["now_ms"]) if first["next_due_ms"] else 0
        dealt = [Taken([], due_in_ms) for _ in askers]
        if first["job_id"] is None:
            place.begins = _HEAD
            return dealt
        last, wanted = rows[-1], sum(each.limit for each in askers)
        place.begins = (last["priority"], last["seq"]) if len(rows) >= wanted else _HEAD
        for row in rows:
            at = row["n"] - 1
            dealt[at].leases.append(lease_of(row, stream, askers[at].token))
        return dealt


def calls_max(engine: Engine) -> int:
    """How many calls of a kind shall be under way: SQLite has one writer that they would share."""
    return 2 if engine.dialect == "postgres" else 1


def lease_of(row: Row, stream: str, token: str, message_id: str = "") -> Lease:
    """A lease, from the row of a claim or of one whose answer was lost."""
    return Lease(
        job_id=row["job_id"],
        queue=stream,
        task=row["task"],
        payload=row["payload"].encode(),
        attempt=row["attempt_count"],
        max_attempts=row["max_attempts"],
        fence=row["claim_version"],
        token=token,
        lease_until_ms=row["lease_expires_at"],
        lease_ms=max(1, row["lease_expires_at"] - row["now_ms"]),
        created_ms=row["created_ms"],
        handle=message_id or f"{row['seq']}-{row['claim_version']}",
        gid=row["gid"],
        priority=row["priority"],
        trace=row["trace"],
        extra=why_unreadable(row) or None,
    )
