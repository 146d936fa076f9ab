"""Claims: lease tokens, fairness between streams, waiting workers, repeated requests."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tenure.contracts.plane.model import Ask, queue_of
from tenure.contracts.plane.transports import Transport, lease_of
from tenure.core.errors import StoreError
from tenure.core.job import short_hash
from tenure.core.lease import Lease
from tenure.core.outcome import Outcome, Verdict
from tenure.core.seam import Quarantined
from tenure.sql.claim import set_aside, why_no_json
from tenure.sql.engine import PLANE, Engine, QueueListener

_NONCE_CHARS = 32
_MARK_CHARS = 16
_TRIES = 5
_TOKENS_KEPT = 4096


class Tokens:
    """Tokens of one database."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        # The leases of one claim share their token, and come back one by one.
        self.token = lru_cache(maxsize=_TOKENS_KEPT)(self._token)

    def nonce(self, requester: str, worker_id: str, claim_id: str) -> str:
        """The nonce of a claim; of one without an id a new one each time."""
        if not claim_id:
            return secrets.token_hex(_NONCE_CHARS // 2)
        return self._mark("claim", requester, worker_id, claim_id)[:_NONCE_CHARS]

    def _token(self, stream: str, nonce: str) -> str:
        """The token of a claim's leases in one stream."""
        return nonce + self._mark("stream", stream, nonce)[:_MARK_CHARS]

    def is_of(self, stream: str, token: str) -> bool:
        """Whether a token was given for this stream."""
        return hmac.compare_digest(
            self.token(stream, token[:_NONCE_CHARS]).encode(), token.encode()
        )

    def _mark(self, *parts: str) -> str:
        # Lengths keep ("a", "bc") and ("ab", "c") apart.
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return hmac.digest(self._secret, text.encode(), "sha256").hex()


async def read_tokens(engine: Engine) -> Tokens:
    """Tokens under the secret that the database holds; chosen now if there is none."""
    for _ in range(_TRIES):
        rows = await engine.run(PLANE, "plane_secret", fresh=secrets.token_hex(32))
        if rows:
            return Tokens(rows[0]["secret"])
    raise StoreError("the planes' common secret could not be read", contract="plane")


class Turns:
    """The turns of one plane; `every` 0 keeps the order of the request always."""

    def __init__(self, every: int = 0) -> None:
        self._every = every
        self._claims: dict[tuple[str, ...], int] = {}

    def order(self, streams: tuple[str, ...]) -> tuple[str, ...]:
        """The streams in the order in which this claim asks them.

        >>> turns = Turns(8)
        >>> [turns.order(("high", "low"))[0] for _ in range(9)][6:]
        ['high', 'low', 'high']
        """
        every = self._every
        if not every or len(streams) < 2:
            return streams
        number = self._claims.get(streams, 0) + 1
        self._claims[streams] = number
        if number % every:
            return streams
        first = 1 + (number // every - 1) % (len(streams) - 1)
        return (streams[first], *streams[:first], *streams[first + 1 :])


# A look when nothing rang, spread so that planes do not come together.
POLL_MS = (500, 1_500)
# Listening goes on for so long after the last one left: workers come back within moments.
IDLE_S = 30.0


class Waiter:
    """Somebody who waits for jobs of some streams."""

    __slots__ = ("streams", "woken")

    def __init__(self, streams: tuple[str, ...]) -> None:
        self.streams = frozenset(streams)
        self.woken = asyncio.Event()


class Line:
    """Everybody who waits at one plane."""

    def __init__(self, listener: Callable[[str], QueueListener]) -> None:
        self._listener = listener
        self._waiting: dict[Waiter, None] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._joined: dict[str, asyncio.Event] = {}
        self._due_ms: dict[str, int] = {}
        self.closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, streams: tuple[str, ...]) -> Waiter:
        """Stand at the end of the line. Join before looking, so that no ring is missed."""
        waiter = Waiter(streams)
        self._waiting[waiter] = None
        for stream in streams:
            self._joined.setdefault(stream, asyncio.Event()).set()
            if stream not in self._watches and not self.closed:
                self._watches[stream] = asyncio.create_task(self._watch(stream))
        return waiter

    def leave(self, waiter: Waiter, *, found: bool) -> None:
        """Go; whoever found something, or did not use its wake-up, wakes the next."""
        self._waiting.pop(waiter, None)
        if found or waiter.woken.is_set():
            for stream in waiter.streams:
                self.wake(stream)

    def wake(self, stream: str) -> None:
        """Wake the one who waits longest for this stream and is not awake."""
        for waiter in self._waiting:
            if stream in waiter.streams and not waiter.woken.is_set():
                waiter.woken.set()
                return

    def due(self, stream: str, due_in_ms: int) -> None:
        """In how many milliseconds a job of the stream is due (0: none known)."""
        self._due_ms[stream] = due_in_ms

    def end(self) -> None:
        """Wake everybody for good."""
        self.closed = True
        for waiter in self._waiting:
            waiter.woken.set()

    async def close(self) -> None:
        """Stop listening."""
        self.end()
        watches = list(self._watches.values())
        self._watches.clear()
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, stream: str) -> None:
        """Listen for one stream while somebody waits for it, and for a while after that."""
        listener, joined = self._listener(stream), self._joined[stream]
        try:
            while True:
                if not any(stream in waiter.streams for waiter in self._waiting):
                    await listener.rest(more=True)  # another plane's wake-up
                    joined.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(IDLE_S):
                            await joined.wait()
                    if not joined.is_set():  # a waiter may join in the moment of the timeout
                        return
                await listener.arm()
                self.wake(stream)
                poll_ms = random.randint(*POLL_MS)
                await listener.wait(max(1, min(poll_ms, self._due_ms.get(stream) or poll_ms)))
        finally:
            if self._watches.get(stream) is asyncio.current_task():
                del self._watches[stream]
            await listener.close()


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
