"""Claims of one plane: those that wait, those that are sent again, those nobody waits for any more.

A claim's number makes the tokens of its leases. So the same claim sent again finds what its first
answer held, and ends the first if that still waits here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tenure.contracts.plane.asking import Ask
from tenure.contracts.plane.line import Line
from tenure.contracts.plane.rows import lease_of
from tenure.contracts.plane.tokens import Tokens
from tenure.contracts.plane.transport import Transport
from tenure.contracts.plane.turns import Turns
from tenure.contracts.plane.words import queue_of
from tenure.core.errors import StoreError
from tenure.core.job import short_hash
from tenure.core.lease import Lease
from tenure.core.outcome import Outcome, Verdict
from tenure.core.seam import Quarantined
from tenure.ledger.engine import PLANE, Engine
from tenure.ledger.unreadable import set_aside, why_no_json

WAIT_MS_MAX = 60_000
_RECOVER_MAX = 1_000


@dataclass(frozen=True, slots=True)
class _Claim:
    """One claim on its way: for whom, of what, and the number that its tokens are made of."""

    ask: Ask
    streams: tuple[str, ...]
    worker_id: str
    tokens: Tokens
    nonce: str


class Claims:
    """Takes leases for whoever asks; `settle` is how those that nobody waits for are released."""

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        line: Line,
        settle: Callable[[Sequence[Outcome]], Awaitable[list[Verdict]]],
        *,
        fair_every: int = 0,
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._line = line
        self._settle = settle
        self._turns = Turns(fair_every)
        self._asking: dict[str, asyncio.Task[list[Lease]]] = {}
        self._giving: set[asyncio.Future[None]] = set()
        self.quarantined: list[Quarantined] = []

    async def take(
        self, ask: Ask, streams: tuple[str, ...], worker_id: str, tokens: Tokens
    ) -> list[Lease]:
        """Leases of these streams; what an answer held that was lost comes before all."""
        again = [*ask.lost] if ask.fresh else [ask.claim_id, *ask.lost]
        for nonce in (tokens.nonce(ask.requester, worker_id, each) for each in again if each):
            await self._supersede(nonce)
            held = await self._recover(nonce, streams, ask.limit, tokens)
            if held:
                return held
        nonce = tokens.nonce(ask.requester, worker_id, ask.claim_id)
        claim = _Claim(ask, streams, worker_id, tokens, nonce)
        if ask.claim_id:
            return await self._numbered(claim)
        if ask.wait_ms <= 0:  # nobody can send it again, nor wants it to end early: it is brief
            return await self._look(claim)
        return await self._wait(claim)

    async def close(self) -> None:
        """Wait until what nobody waits for is released."""
        await asyncio.gather(*self._giving, return_exceptions=True)

    async def _numbered(self, claim: _Claim) -> list[Lease]:
        """One that may be sent again, and then ends here."""
        asking = asyncio.ensure_future(self._wait(claim))
        self._asking[claim.nonce] = asking
        try:
            return await asking
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return []  # superseded: the same claim was sent again, and is answered there
        finally:
            if self._asking.get(claim.nonce) is asking:
                del self._asking[claim.nonce]

    async def _wait(self, claim: _Claim) -> list[Lease]:
        ask = claim.ask
        deadline = asyncio.get_running_loop().time() + min(ask.wait_ms, WAIT_MS_MAX) / 1000
        leases = [] if ask.looked else await self._once(claim)
        if leases or ask.wait_ms <= 0:
            return leases
        waiter = self._line.join(claim.streams)
        try:
            while not leases and not self._line.closed:
                waiter.woken.clear()
                leases = await self._once(claim)
                if leases:
                    break
                try:
                    async with asyncio.timeout_at(deadline):
                        await waiter.woken.wait()
                except TimeoutError:
                    break
        finally:
            self._line.leave(waiter, found=bool(leases))
        return leases

    async def _once(self, claim: _Claim) -> list[Lease]:
        """What can be had now. It is not left half done: who goes away meanwhile gives it back."""
        looking = asyncio.ensure_future(self._look(claim))
        try:
            return await asyncio.shield(looking)
        except asyncio.CancelledError:
            giving = asyncio.ensure_future(self._give_back(looking))
            self._giving.add(giving)
            giving.add_done_callback(self._giving.discard)
            await asyncio.shield(giving)
            raise

    async def _give_back(self, looking: asyncio.Future[list[Lease]]) -> None:
        """Release what nobody will work on; what cannot be released runs out."""
        with contextlib.suppress(StoreError):
            leases = await looking
            await self._settle([Outcome(lease, "release") for lease in leases])

    async def _look(self, claim: _Claim) -> list[Lease]:
        limit = claim.ask.limit
        leases: list[Lease] = []
        for stream in self._turns.order(claim.streams):
            token = claim.tokens.token(stream, claim.nonce)
            while len(leases) < limit:
                left = limit - len(leases)
                taken = await self._transport.take(stream, left, claim.worker_id, token)
                self._line.due(stream, taken.due_in_ms)
                readable = await self._readable(taken.leases)
                leases += readable
                if len(readable) == len(taken.leases):
                    break
            if len(leases) >= limit:
                break
        return leases

    async def _supersede(self, nonce: str) -> None:
        """The same claim that still waits here has no reader any more."""
        waiting = self._asking.get(nonce)
        if waiting is not None:
            if not waiting.cancelling():
                waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _recover(
        self, nonce: str, streams: tuple[str, ...], limit: int, tokens: Tokens
    ) -> list[Lease]:
        leases: list[Lease] = []
        for stream in streams:
            token = tokens.token(stream, nonce)
            rows = await self._engine.run(
                PLANE,
                "recover",
                queue=queue_of(stream),
                token_hs=[short_hash(token.encode())],
                count=min(limit, _RECOVER_MAX),
            )
            leases += [lease_of(row, stream, token) for row in rows]
        return (await self._readable(leases))[:limit]

    async def _readable(self, leases: list[Lease]) -> list[Lease]:
        """What a worker can be given; the rest is set aside."""
        reasons = [str(lease.extra or why_no_json(lease.payload)) for lease in leases]
        if not any(reasons):
            return leases
        return await set_aside(leases, reasons, self._settle, self.quarantined)
