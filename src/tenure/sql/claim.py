"""Claim leases in order, wait for jobs, and recover the leases of lost answers.

Every claim has its own token. If its answer is lost, the next claims first look for leases under
that token, for as long as such a lease may last.

While an old transaction is open, PostgreSQL keeps dead index entries at the head of a queue. A
claimer that got all it wanted therefore continues where it stopped. It starts at the head again
every second, or when it sent a job back itself.

The same holds for the index of leases: a busy claimer looks for expired leases seldom, and from
where it stopped. A full scan every ten seconds finds leases that were given under a wrong clock.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import msgspec

from tenure.core.encoding import short_hash
from tenure.core.lease import Lease
from tenure.core.outcome import Failure, Outcome, Verdict
from tenure.core.seam import Quarantined
from tenure.sql.engine import Engine, QueueSettings, Row, UnreadableRow, why_unreadable

CLAIM_MAX = 1_000
# Poll even without a notice, at random times so that workers spread (inbox contract, section 12).
POLL_MS = (500, 1_500)
_HEAD = (-(2**31), -1)  # before the first job: priority, seq
_HEAD_EVERY_S = 1.0
_CHECK_DUE_EVERY_S = 0.05
_CHECK_LEASES_EVERY_S = 0.5
_LEASE_CHECKS_MIN = 20  # a short lease is checked at least this often while it lasts
_CHECK_ALL_LEASES_EVERY_S = 10.0
_NO_LIMIT = 2**62
_NO_LEASES_MS = 2**62  # no lease expires this late, so none is checked
_UNBLOCK_EVERY_S = 0.25
_SHARE_POLL_MS = 100
_QUARANTINED_MAX = 1_000
_decode_raw = msgspec.json.Decoder(msgspec.Raw).decode

_Settle: TypeAlias = Callable[[Sequence[Outcome]], Awaitable[list[Verdict]]]


class SqlClaimer:
    """Claims of one queue instance, one at a time."""

    def __init__(
        self,
        engine: Engine,
        settings: QueueSettings,
        worker_id: str,
        make_due: Callable[[], Awaitable[object]],
        unblock: Callable[[], Awaitable[int]],
        settle: _Settle,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._worker_id = worker_id
        self._make_due = make_due
        self._unblock = unblock
        self._settle = settle
        self._listener = engine.listener(settings.queue)
        self._turn = asyncio.Lock()
        self._unanswered: dict[str, tuple[str, float]] = {}
        self._recovered: set[tuple[str, int]] = set()
        self._position = _HEAD
        self._head_at = 0.0
        self._due_checked_at = 0.0
        self._leases_checked_at = self._all_leases_checked_at = 0.0
        self._leases_checked_to_ms = 0
        self._unblocked_at = 0.0
        self.quarantined: list[Quarantined] = []

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Up to `limit` leases, waiting for the first."""
        if limit < 1:
            return []
        if self._settings.share:  # one by one, so that each claim sees the jobs of its requester
            limit = 1
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        if wait_ms <= 0:
            return (await self._claim_now(limit))[0]
        woken = False
        try:
            while True:
                woken = await self._listener.arm() or woken
                leases, due_in_ms, more = await self._claim_now(limit)
                woken = woken and more
                left_ms = round((deadline - loop.time()) * 1000)
                if leases or left_ms <= 0:
                    return leases
                poll_ms = random.randint(*POLL_MS)
                await self._listener.wait(max(1, min(left_ms, poll_ms, due_in_ms or poll_ms)))
                woken = True
        finally:
            # A wake-up is passed on unless a later claim emptied the queue. A claim that failed or
            # was cancelled has not done so.
            await self._listener.disarm(more=woken)

    def start_at_head(self) -> None:
        """Let the next claim begin at the head, because a job became claimable again."""
        self._position = _HEAD

    async def close(self) -> None:
        """Stop listening."""
        await self._listener.close()

    async def _claim_now(self, limit: int) -> tuple[list[Lease], int, bool]:
        """The leases of one claim, in how many milliseconds the next job is due (0: none), and
        whether there may be more to claim.
        """
        async with self._turn:
            if self._unanswered:
                leases = await self._recover(limit)
                if leases:
                    return leases, 0, True
            now = asyncio.get_running_loop().time()
            check_due = now - self._due_checked_at > _CHECK_DUE_EVERY_S or self._position == _HEAD
            rows, token = await self._claim(limit, now, check_due=check_due)
            if rows[0]["overdue"]:
                await self._make_due()
                self.start_at_head()
                rows, token = await self._claim(limit, now, check_due=False)
            leases = await self._leases(rows, token, limit)
            while not leases and rows[-1]["job_id"] is not None:  # all of them were unreadable
                rows, token = await self._claim(limit, now, check_due=False)
                leases = await self._leases(rows, token, limit)
            # Event N+1 of a job may commit after event N has ended, so that nothing made it ready.
            concurrent = self._engine.dialect == "postgres"
            if concurrent and not leases and now - self._unblocked_at > _UNBLOCK_EVERY_S:
                self._unblocked_at = now
                if await self._unblock():
                    return leases, 1, True
            return leases, _due_in_ms(rows[0]), len(_taken(rows)) >= limit

    async def _claim(self, limit: int, now: float, *, check_due: bool) -> tuple[list[Row], str]:
        token = secrets.token_hex(16)
        token_h = short_hash(token.encode())
        if now - self._head_at > _HEAD_EVERY_S:
            self.start_at_head()
        if self._position == _HEAD:
            self._head_at = now
        if check_due:
            self._due_checked_at = now
        expired_from_ms = self._expired_from_ms(now) if check_due else _NO_LEASES_MS
        settings = self._settings
        # Stored before the call: if it is cancelled, the next claim looks for its leases.
        self._unanswered[token_h] = (token, now + settings.lease_ms / 1000)
        rows = await self._engine.run(
            settings.table,
            "claim+share" if settings.share else "claim",
            queue=settings.queue,
            count=limit,
            lease_ms=settings.lease_ms,
            worker_id=self._worker_id,
            token_h=token_h,
            check_due=check_due,
            from_priority=self._position[0],
            from_seq=self._position[1],
            expired_from_ms=expired_from_ms,
            share=settings.share,
            requester_max=settings.requester_max,
        )
        del self._unanswered[token_h]
        if rows[0]["overdue"]:
            self._all_leases_checked_at = 0.0
        elif expired_from_ms != _NO_LEASES_MS:
            self._leases_checked_at, self._leases_checked_to_ms = now, rows[0]["now_ms"]
        return list(rows), token

    def _expired_from_ms(self, now: float) -> int:
        """From which expiry time on to look for expired leases."""
        if now - self._all_leases_checked_at > _CHECK_ALL_LEASES_EVERY_S:
            self._all_leases_checked_at = now
            return 0
        every_s = min(_CHECK_LEASES_EVERY_S, self._settings.lease_ms / 1000 / _LEASE_CHECKS_MIN)
        if self._position != _HEAD and now - self._leases_checked_at < every_s:
            return _NO_LEASES_MS
        return self._leases_checked_to_ms

    async def _leases(self, rows: list[Row], token: str, limit: int) -> list[Lease]:
        taken = _taken(rows)
        last = rows[-1]
        self._position = (last["priority"], last["seq"]) if len(taken) >= limit else _HEAD
        now_ms = rows[0]["now_ms"]
        leases = [self._lease(row, token, now_ms) for row in taken]
        if leases and isinstance(taken[0], UnreadableRow):  # at least one of the rows is
            reasons = list(map(why_unreadable, taken))
            return await bury_unreadable(leases, reasons, self._settle, self.quarantined)
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
            bytes=_NO_LIMIT,
        )
        missed = [
            row for row in rows if (row["job_id"], row["claim_version"]) not in self._recovered
        ]
        leases = [
            self._lease(row, self._unanswered[row["lease_token_h"]][0], row["now_ms"])
            for row in missed[:limit]
        ]
        self._recovered.update((lease.job_id, lease.fence) for lease in leases)
        for token_h, (_, until) in list(self._unanswered.items()):
            if now > until:  # its leases have expired
                del self._unanswered[token_h]
        if not self._unanswered:
            self._recovered.clear()
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
            ttl_ms=ttl_ms(row),
            requester=row["requester_id"] or "",
            webhook_url=row["status_webhook_url"] or "",
        )


def ttl_ms(row: Row) -> int:
    """The time to live in a row of a claim; 0 if its job has none."""
    return row["expires_ms"] - row["created_ms"] if row["expires_ms"] else 0


def _taken(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["job_id"] is not None]


def _due_in_ms(row: Row) -> int:
    due_ms = max(1, row["next_due_ms"] - row["now_ms"]) if row["next_due_ms"] else 0
    # There is no notice when a requester falls below its share, so poll.
    return min(due_ms or _SHARE_POLL_MS, _SHARE_POLL_MS) if row["left_by_share"] else due_ms


def why_no_json(payload: bytes) -> str:
    """Why a payload is not JSON; "" if it is."""
    try:
        _decode_raw(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"the payload is not JSON: {error}"
    return ""


async def bury_unreadable(
    leases: Sequence[Lease], reasons: Sequence[str], settle: _Settle, quarantined: list[Quarantined]
) -> list[Lease]:
    """Bury the unreadable jobs, each with its reason; returns the other leases.

    Another program may have stored text that is not UTF-8, or a payload that is not JSON.
    """
    ends: list[Outcome] = []
    for lease, why in zip(leases, reasons, strict=True):
        if why:
            quarantined.append(Quarantined(lease.job_id, why))
            failure = Failure(code="unreadable", message=why, retryable=False)
            ends.append(Outcome(lease, "bury", failure=failure))
    del quarantined[:-_QUARANTINED_MAX]
    await settle(ends)
    return [lease for lease, why in zip(leases, reasons, strict=True) if not why]
