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

from tenure.contracts.plane.model import Claim, queue_of
from tenure.contracts.plane.transports import Transport, lease_of
from tenure.core.encoding import short_hash
from tenure.core.errors import StoreError
from tenure.core.lease import Lease
from tenure.core.outcome import Outcome, Verdict
from tenure.core.seam import PAGE_BYTES, Quarantined
from tenure.sql.claim import bury_unreadable, why_no_json
from tenure.sql.engine import PLANE, Engine, QueueListener
from tenure.store.batcher import Turns

_NONCE_CHARS = 32
_SIGNATURE_CHARS = 16
_TRIES = 5
_TOKENS_KEPT = 4096
_ORDERS_MAX = 1_000


class Tokens:
    """Lease tokens of one database.

    A token is the nonce of its claim and a signature for its stream, made with a secret that all
    planes of the database share. So a token of one stream is worthless in another, and a claim that
    is sent again gets the same tokens.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        # The leases of one claim share their token and are settled one by one.
        self.token = lru_cache(maxsize=_TOKENS_KEPT)(self._token)

    def nonce(self, requester: str, worker_id: str, claim_id: str) -> str:
        """The nonce of a claim; a claim without an id gets a new one each time."""
        if not claim_id:
            return secrets.token_hex(_NONCE_CHARS // 2)
        return self._sign("claim", requester, worker_id, claim_id)[:_NONCE_CHARS]

    def _token(self, stream: str, nonce: str) -> str:
        """The token of a claim's leases in one stream."""
        return nonce + self._sign("stream", stream, nonce)[:_SIGNATURE_CHARS]

    def is_of(self, stream: str, token: str) -> bool:
        """Whether a token was given for this stream."""
        return hmac.compare_digest(
            self.token(stream, token[:_NONCE_CHARS]).encode(), token.encode()
        )

    def _sign(self, *parts: str) -> str:
        # The lengths tell ("a", "bc") from ("ab", "c").
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return hmac.digest(self._secret, text.encode(), "sha256").hex()


async def read_tokens(engine: Engine) -> Tokens:
    """The tokens of a database, whose secret is chosen now if it has none."""
    for _ in range(_TRIES):
        rows = await engine.run(PLANE, "plane_secret", fresh=secrets.token_hex(32))
        if rows:
            return Tokens(rows[0]["secret"])
    raise StoreError("the planes' common secret could not be read", contract="plane")


class _StreamRotation:
    """Lets every n-th claim begin with another stream; 0 keeps the order of the request."""

    def __init__(self, every: int = 0) -> None:
        self._every = every
        self._claims: dict[tuple[str, ...], int] = {}

    def order(self, streams: tuple[str, ...]) -> tuple[str, ...]:
        """The streams in the order in which this claim looks into them.

        >>> rotation = _StreamRotation(8)
        >>> [rotation.order(("high", "low"))[0] for _ in range(9)][6:]
        ['high', 'low', 'high']
        """
        every = self._every
        if not every or len(streams) < 2:
            return streams
        if len(self._claims) >= _ORDERS_MAX:
            self._claims.clear()
        number = self._claims.get(streams, 0) + 1
        self._claims[streams] = number
        if number % every:
            return streams
        first = 1 + (number // every - 1) % (len(streams) - 1)
        return (streams[first], *streams[:first], *streams[first + 1 :])


# How often to look without a notice: at random times, so that planes do not look all at once.
POLL_MS = (500, 1_500)
# Listening goes on for this long after the last waiter left: workers claim again soon.
IDLE_S = 30.0


class _Waiter:
    """A claim that waits for jobs of some streams."""

    __slots__ = ("streams", "woken")

    def __init__(self, streams: tuple[str, ...]) -> None:
        self.streams = frozenset(streams)
        self.woken = asyncio.Event()


class Waiters:
    """The claims that wait at one plane, longest first."""

    def __init__(self, listener: Callable[[str], QueueListener]) -> None:
        self._listener = listener
        self._waiting: dict[_Waiter, None] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._joined: dict[str, asyncio.Event] = {}
        self._due_ms: dict[str, int] = {}
        self.closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, streams: tuple[str, ...]) -> _Waiter:
        """Add a waiter. Join before looking for jobs, so that no notice is missed."""
        waiter = _Waiter(streams)
        self._waiting[waiter] = None
        for stream in streams:
            self._joined.setdefault(stream, asyncio.Event()).set()
            if stream not in self._watches and not self.closed:
                self._watches[stream] = asyncio.create_task(self._watch(stream))
        return waiter

    def leave(self, waiter: _Waiter, *, found: bool) -> None:
        """Remove a waiter. If it found jobs, or did not use its wake-up, the next one is woken."""
        self._waiting.pop(waiter, None)
        if found or waiter.woken.is_set():
            for stream in waiter.streams:
                self.wake(stream)

    def wake(self, stream: str) -> None:
        """Wake the waiter that waits longest for this stream and is not awake yet."""
        for waiter in self._waiting:
            if stream in waiter.streams and not waiter.woken.is_set():
                waiter.woken.set()
                return

    def set_due(self, stream: str, due_in_ms: int) -> None:
        """A job of the stream is due in `due_in_ms`: look again then (0: none is known)."""
        self._due_ms[stream] = due_in_ms

    def end(self) -> None:
        """Wake all waiters; no more can wait."""
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
        """Listen for one stream while a claim waits for it, and for a while after that."""
        listener, joined = self._listener(stream), self._joined[stream]
        try:
            while True:
                if not any(stream in waiter.streams for waiter in self._waiting):
                    await listener.disarm(more=True)  # let another plane have the notice
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
# How many claims of one key take leases at the same time, each of some megabytes. The others
# wait for their turn. A claim that waits for jobs is not counted.
_TAKING_MAX = 16


@dataclass(frozen=True, slots=True)
class _ActiveClaim:
    """A claim that runs, with the checked streams and worker, and what its tokens are made of."""

    claim: Claim
    streams: tuple[str, ...]
    worker_id: str
    tokens: Tokens
    nonce: str


class Claims:
    """Takes leases for claims; `settle` releases those whose claimer has gone."""

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        waiters: Waiters,
        settle: Callable[[Sequence[Outcome]], Awaitable[list[Verdict]]],
        *,
        fair_every: int = 0,
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._waiters = waiters
        self._settle = settle
        self._rotation = _StreamRotation(fair_every)
        self._turns = Turns(_TAKING_MAX)
        self._active: dict[str, asyncio.Task[list[Lease]]] = {}
        self._releasing: set[asyncio.Future[None]] = set()
        self.quarantined: list[Quarantined] = []

    async def take(
        self, claim: Claim, streams: tuple[str, ...], worker_id: str, tokens: Tokens
    ) -> list[Lease]:
        """Leases of these streams; those of a lost answer come first."""
        earlier = [*claim.lost] if claim.fresh else [claim.claim_id, *claim.lost]
        for claim_id in filter(None, earlier):
            nonce = tokens.nonce(claim.requester, worker_id, claim_id)
            await self._supersede(nonce)
            async with self._turns.of(claim.requester):
                held = await self._recover(nonce, streams, claim.limit, tokens)
            if held:
                return held
        nonce = tokens.nonce(claim.requester, worker_id, claim.claim_id)
        active = _ActiveClaim(claim, streams, worker_id, tokens, nonce)
        if claim.claim_id:
            return await self._run_resendable(active)
        if claim.wait_ms <= 0:  # it cannot be sent again and is brief, so nothing needs to end it
            async with self._turns.of(claim.requester):
                return await self._look(active)
        return await self._wait(active)

    async def close(self) -> None:
        """Wait until the leases of claimers that have gone are released."""
        await asyncio.gather(*self._releasing, return_exceptions=True)

    async def _run_resendable(self, active: _ActiveClaim) -> list[Lease]:
        """Run a claim with an id; if the same claim is sent again, this one ends."""
        running = asyncio.ensure_future(self._wait(active))
        self._active[active.nonce] = running
        try:
            return await running
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return []  # superseded: the same claim was sent again and is answered there
        finally:
            if self._active.get(active.nonce) is running:
                del self._active[active.nonce]

    async def _wait(self, active: _ActiveClaim) -> list[Lease]:
        claim = active.claim
        deadline = asyncio.get_running_loop().time() + min(claim.wait_ms, WAIT_MS_MAX) / 1000
        leases = [] if claim.looked else await self._look_shielded(active)
        if leases or claim.wait_ms <= 0:
            return leases
        waiter = self._waiters.join(active.streams)
        try:
            while not leases and not self._waiters.closed:
                waiter.woken.clear()
                leases = await self._look_shielded(active)
                if leases:
                    break
                try:
                    async with asyncio.timeout_at(deadline):
                        await waiter.woken.wait()
                except TimeoutError:
                    break
                if claim.is_allowed is not None and not await claim.is_allowed():
                    break  # its key was revoked while it waited
        finally:
            self._waiters.leave(waiter, found=bool(leases))
        return leases

    async def _look_shielded(self, active: _ActiveClaim) -> list[Lease]:
        """Look once. If the claim is cancelled during the look, its leases are released."""
        async with self._turns.of(active.claim.requester):
            looking = asyncio.ensure_future(self._look(active))
            try:
                return await asyncio.shield(looking)
            except asyncio.CancelledError:
                releasing = asyncio.ensure_future(self._release(looking))
                self._releasing.add(releasing)
                releasing.add_done_callback(self._releasing.discard)
                await asyncio.shield(releasing)
                raise

    async def _release(self, looking: asyncio.Future[list[Lease]]) -> None:
        """Release leases whose claimer has gone; if that fails, they expire."""
        with contextlib.suppress(StoreError):
            leases = await looking
            await self._settle([Outcome(lease, "release") for lease in leases])

    async def _look(self, active: _ActiveClaim) -> list[Lease]:
        """The leases that can be had now, up to the one that reaches `PAGE_BYTES`."""
        limit = active.claim.limit
        leases: list[Lease] = []
        for stream in self._rotation.order(active.streams):
            token = active.tokens.token(stream, active.nonce)
            while len(leases) < limit and _size(leases) < PAGE_BYTES:
                left = limit - len(leases)
                taken = await self._transport.take(stream, left, active.worker_id, token)
                self._waiters.set_due(stream, taken.due_in_ms)
                readable = await self._readable(taken.leases)
                leases += readable
                if len(readable) == len(taken.leases):
                    break
        return leases

    async def _supersede(self, nonce: str) -> None:
        """End the same claim if it still waits here: its client reads no answer any more."""
        running = self._active.get(nonce)
        if running is not None:
            if not running.cancelling():
                running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _recover(
        self, nonce: str, streams: tuple[str, ...], limit: int, tokens: Tokens
    ) -> list[Lease]:
        """The leases that an earlier claim took and whose answer was lost."""
        leases: list[Lease] = []
        for stream in streams:
            if _size(leases) >= PAGE_BYTES:
                break
            token = tokens.token(stream, nonce)
            rows = await self._engine.run(
                PLANE,
                "recover",
                queue=queue_of(stream),
                token_hs=[short_hash(token.encode())],
                count=min(limit, _RECOVER_MAX),
                bytes=PAGE_BYTES,
            )
            leases += [lease_of(row, stream, token) for row in rows]
        return (await self._readable(leases))[:limit]

    async def _readable(self, leases: list[Lease]) -> list[Lease]:
        """The leases that a worker can be given; the other jobs are buried."""
        reasons = [str(lease.extra or why_no_json(lease.payload)) for lease in leases]
        if not any(reasons):
            return leases
        return await bury_unreadable(leases, reasons, self._settle, self.quarantined)


def _size(leases: Sequence[Lease]) -> int:
    return sum(len(lease.payload) for lease in leases)
