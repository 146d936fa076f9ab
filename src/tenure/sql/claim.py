"""Claim leases: in order, without needless waits, and without losing what a lost answer held.

Every claim has a token of its own. When an answer does not come, the next claims look first for
leases under that token, for as long as such a lease may last.

PostgreSQL keeps dead index entries at the head of a queue for as long as an old transaction is
open. A claimer that got all it asked for therefore continues where it stopped, and
starts at the head again every second, or when it sent a job back itself.

The same holds for leases, whose entries stay long after their jobs have ended: a busy claimer looks
for expired leases seldom, and from where it stopped. What was given under a wrong clock is found by
the next full look.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import msgspec

from tenure.core.job import short_hash
from tenure.core.lease import Lease
from tenure.core.outcome import Failure, Outcome, Verdict
from tenure.core.seam import Quarantined
from tenure.sql.engine import Engine, QueueSettings, Row, UnreadableRow, why_unreadable

CLAIM_MAX = 1_000
# Contract section 12: poll even without a notice, at random times so that workers spread out.
POLL_MS = (500, 1_500)
_HEAD = (-(2**31), -1)
_HEAD_AGAIN_S = 1.0
_LOOK_EVERY_S = 0.05
_LEASES_EVERY_S = 0.5
_LEASES_PARTS = 20
_LEASES_WHOLE_S = 10.0
_NOT_NOW_MS = 2**62
_UNBLOCK_EVERY_S = 0.25
_LEFT_AGAIN_MS = 100
_NOTED_MAX = 1_000
_decode_raw = msgspec.json.Decoder(msgspec.Raw).decode

_Settle: TypeAlias = Callable[[Sequence[Outcome]], Awaitable[list[Verdict]]]


class Claimer:
    """Claims of one queue instance, one at a time."""

    def __init__(
        self,
        engine: Engine,
        settings: QueueSettings,
        worker_id: str,
        chores: Callable[[], Awaitable[object]],
        unblock: Callable[[], Awaitable[int]],
        settle: _Settle,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._worker_id = worker_id
        self._chores = chores
        self._unblock = unblock
        self._settle = settle
        self._listener = engine.listener(settings.queue)
        self._turn = asyncio.Lock()
        self._unanswered: dict[str, tuple[str, float]] = {}
        self._given: set[tuple[str, int]] = set()
        self._from = _HEAD
        self._head_at = 0.0
        self._looked_at = 0.0
        self._leases_at = self._leases_whole_at = 0.0
        self._leases_ms = 0
        self._unblocked_at = 0.0
        self.quarantined: list[Quarantined] = []

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Up to `limit` leases, waiting for the first."""
        if limit < 1:
            return []
        if self._settings.share:  # one by one, so that each sees what its requester has already
            limit = 1
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        if wait_ms <= 0:
            return (await self._once(limit))[0]
        woken = False
        try:
            while True:
                woken = await self._listener.arm() or woken
                leases, due_in_ms, more = await self._once(limit)
                woken = woken and more
                left_ms = round((deadline - loop.time()) * 1000)
                if leases or left_ms <= 0:
                    return leases
                poll_ms = random.randint(*POLL_MS)
                await self._listener.wait(max(1, min(left_ms, poll_ms, due_in_ms or poll_ms)))
                woken = True
        finally:
            # A wake-up is passed on unless a later claim emptied the queue: one that failed or was
            # cancelled has not seen what is there.
            await self._listener.rest(more=woken)

    def from_the_head(self) -> None:
        """A job became claimable again: the next claim begins at the head."""
        self._from = _HEAD

    async def close(self) -> None:
        """Stop listening."""
        await self._listener.close()

    async def _once(self, limit: int) -> tuple[list[Lease], int, bool]:
        """The leases to be had now, in how many ms the next job is due (0: none), and whether
        there may be more to claim.
        """
        async with self._turn:
            if self._unanswered:
                leases = await self._recover(limit)
                if leases:
                    return leases, 0, True
            now = asyncio.get_running_loop().time()
            look = now - self._looked_at > _LOOK_EVERY_S or self._from == _HEAD
            rows, token = await self._ask(limit, now, look=look)
            if rows[0]["overdue"]:
                await self._chores()
                self.from_the_head()
                rows, token = await self._ask(limit, now, look=False)
            leases = await self._leases(rows, token, limit)
            while not leases and rows[-1]["job_id"] is not None:  # none of them could be read
                rows, token = await self._ask(limit, now, look=False)
                leases = await self._leases(rows, token, limit)
            # With concurrent writers an event may have missed the end of the one before it.
            concurrent = self._engine.dialect == "postgres"
            if concurrent and not leases and now - self._unblocked_at > _UNBLOCK_EVERY_S:
                self._unblocked_at = now
                if await self._unblock():
                    return leases, 1, True
            return leases, _due_in_ms(rows[0]), len(_taken(rows)) >= limit

    async def _ask(self, limit: int, now: float, *, look: bool) -> tuple[list[Row], str]:
        token = secrets.token_hex(16)
        token_h = short_hash(token.encode())
        if now - self._head_at > _HEAD_AGAIN_S:
            self.from_the_head()
        if self._from == _HEAD:
            self._head_at = now
        if look:
            self._looked_at = now
        leases_ms = self._leases_from(now) if look else _NOT_NOW_MS
        settings = self._settings
        # Before the call: if it ends early, the next claim looks for what it took.
        self._unanswered[token_h] = (token, now + settings.lease_ms / 1000)
        rows = await self._engine.run(
            settings.table,
            "claim+share" if settings.share else "claim",
            queue=settings.queue,
            count=limit,
            lease_ms=settings.lease_ms,
            worker_id=self._worker_id,
            token_h=token_h,
            look=look,
            from_priority=self._from[0],
            from_seq=self._from[1],
            leases_ms=leases_ms,
            share=settings.share,
            requester_max=settings.requester_max,
        )
        del self._unanswered[token_h]
        if rows[0]["overdue"]:
            self._leases_whole_at = 0.0
        elif leases_ms != _NOT_NOW_MS:
            self._leases_at, self._leases_ms = now, rows[0]["now_ms"]
        return list(rows), token

    def _leases_from(self, now: float) -> int:
        """Look for leases that expire from this time on; none when that was done just now."""
        if now - self._leases_whole_at > _LEASES_WHOLE_S:
            self._leases_whole_at = now
            return 0
        every_s = min(_LEASES_EVERY_S, self._settings.lease_ms / 1000 / _LEASES_PARTS)
        busy = self._from != _HEAD
        return _NOT_NOW_MS if busy and now - self._leases_at < every_s else self._leases_ms

    async def _leases(self, rows: list[Row], token: str, limit: int) -> list[Lease]:
        taken = _taken(rows)
        last = rows[-1]
        self._from = (last["priority"], last["seq"]) if len(taken) >= limit else _HEAD
        now_ms = rows[0]["now_ms"]
        leases = [self._lease(row, token, now_ms) for row in taken]
        if leases and isinstance(taken[0], UnreadableRow):  # it is, or one of its neighbours
            reasons = list(map(why_unreadable, taken))
            return await set_aside(leases, reasons, self._settle, self.quarantined)
        return leases

    async def _recover(self, limit: int) -> list[Lease]:
        now = asyncio.get_running_loop().time()
        settings = self._settings
        rows = await self._engine.run(
            settings.table,
            "recover",
            queue=settings.queue,
            token_hs=list(self._unanswered),
            count=CLAIM_MAX,
        )
        missed = [row for row in rows if (row["job_id"], row["claim_version"]) not in self._given]
        leases = [
            self._lease(row, self._unanswered[row["lease_token_h"]][0], row["now_ms"])
            for row in missed[:limit]
        ]
        self._given.update((lease.job_id, lease.fence) for lease in leases)
        for token_h, (_, until) in list(self._unanswered.items()):
            if now > until:  # its leases have expired
                del self._unanswered[token_h]
        if not self._unanswered:
            self._given.clear()
        return leases

    def _lease(self, row: Row, token: str, now_ms: int) -> Lease:
        until_ms = row["lease_expires_at"]
        return Lease(
            job_id=row["job_id"],
            queue=self._settings.queue,
            task=row["task"],
            payload=row["payload"].encode(),
            attempt=row["attempt_count"],
            max_attempts=row["max_attempts"],
            fence=row["claim_version"],
            token=token,
            lease_until_ms=until_ms,
            lease_ms=max(1, until_ms - now_ms),
            created_ms=row["created_ms"],
            gid=row["gid"],
            priority=row["priority"],
            trace=row["trace"],
            requester=row["requester_id"] or "",
            webhook_url=row["status_webhook_url"] or "",
        )


def _taken(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["job_id"] is not None]


def _due_in_ms(row: Row) -> int:
    due_ms = max(1, row["next_due_ms"] - row["now_ms"]) if row["next_due_ms"] else 0
    # There is no notice when a requester that had its share gives a job back.
    return min(due_ms or _LEFT_AGAIN_MS, _LEFT_AGAIN_MS) if row["left_some"] else due_ms


def why_no_json(payload: bytes) -> str:
    """Why a payload cannot be part of a JSON text; "" when it can."""
    try:
        _decode_raw(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"the payload is not JSON: {error}"
    return ""


async def set_aside(
    leases: Sequence[Lease], reasons: Sequence[str], settle: _Settle, noted: list[Quarantined]
) -> list[Lease]:
    """Bury the jobs that cannot be handed out, each for its reason; returns the other leases.

    Another program may store text that is not UTF-8, or a payload that is not JSON.
    """
    ends: list[Outcome] = []
    for lease, why in zip(leases, reasons, strict=True):
        if why:
            noted.append(Quarantined(lease.job_id, why))
            failure = Failure(code="unreadable", message=why, retryable=False)
            ends.append(Outcome(lease, "bury", failure=failure))
    del noted[:-_NOTED_MAX]
    await settle(ends)
    return [lease for lease, why in zip(leases, reasons, strict=True) if not why]
