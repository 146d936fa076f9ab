"""The control plane: it owns the truth of its jobs, and hands out leases to whoever asks.

A claim looks into its streams in their order, waits in `line` if there is nothing, and takes what
the `transport` points to by one statement that makes lease, attempt and state at once. A settle is
decided in the database first; only then is the message acknowledged. Every other plane of the same
database may do the same at the same time: nothing is kept here that another one would need.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from tenure.contracts.plane import MACHINE
from tenure.contracts.plane.claims import Claims, Line, Tokens, read_tokens
from tenure.contracts.plane.model import CONTRACT, Ask, PlaneOptions, queue_of, stream_of, warn
from tenure.contracts.plane.transports import MessageTransport, RowTransport, Transport, calls_max
from tenure.core.errors import LeaseLost, StoreError, UsageError
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Released, Retried, Verdict
from tenure.core.retry import delay_ms, exponential
from tenure.core.seam import Quarantined, Upkeep
from tenure.sql.engine import PLANE, Engine
from tenure.sql.sql_queue import SqlQueue
from tenure.sql.upkeep import Upkeeper
from tenure.store.batcher import Batcher
from tenure.store.redis import Redis

T = TypeVar("T")
R = TypeVar("R")

_SAFE_ID = re.compile(r"[^A-Za-z0-9_.:@-]")
_BEAT_S = 5.0
_BEATEN_MAX = 20_000
_GATHERED_MAX = 500
_SENT_BACK = (Released, Retried)
_NO_PRIORITY = (
    "a Redis stream has one order, so a job of this plane has no priority: choose another stream"
)


class Plane:
    """One instance of the control plane, for one event loop."""

    def __init__(
        self, engine: Engine, options: PlaneOptions, *, redis: Redis | None = None
    ) -> None:
        self.options = options
        self.streams = options.names
        self._engine = engine
        self._id = f"plane-{secrets.token_hex(4)}"
        settings = {stream: options.settings(stream) for stream in self.streams}
        self._boxes = {
            stream: SqlQueue(
                engine,
                settings[stream],
                worker_id=self._id,
                delay=self._delay,
                finals=frozenset(MACHINE.final),
            )
            for stream in self.streams
        }
        self._chores = {name: Upkeeper(engine, settings[name], "") for name in self.streams}
        self._transport: Transport = RowTransport(engine, settings, self._chores)
        if redis is not None:
            self._transport = MessageTransport(
                engine,
                redis,
                settings,
                self._chores,
                consumer=self._id,
                namespace=options.namespace,
                resend_ms=options.resend_ms,
            )
        self._has_priority = redis is None
        calls = calls_max(engine)
        self._extends: dict[bool, Batcher[Lease, Lease | LeaseLost]] = {
            always: Batcher(partial(self._extend, always), items_max=_GATHERED_MAX, calls_max=calls)
            for always in (False, True)
        }
        self._settles: Batcher[Outcome, Verdict] = Batcher(
            self._settle, items_max=_GATHERED_MAX, calls_max=calls
        )
        self._line = Line(self._transport.listener)
        self._claims = Claims(
            engine, self._transport, self._line, self.settle, fair_every=options.fair_every
        )
        self._tokens: Tokens | None = None
        self._reading_tokens = asyncio.Lock()
        self._beaten: dict[str, tuple[float, int]] = {}
        self._rounds: asyncio.Task[None] | None = None

    def take_quarantined(self) -> list[Quarantined]:
        """What was set aside since the last call."""
        noted, self._claims.quarantined = self._claims.quarantined, []
        return noted

    # --- claims --------------------------------------------------------------------------------

    async def claim(self, ask: Ask) -> list[Lease]:
        """Take leases, waiting for the first; what a lost answer held comes before all."""
        if ask.limit < 1:
            return []
        streams = self.served(ask.streams)
        worker_id = _SAFE_ID.sub("-", ask.worker_id)[:200] or "anon"
        await self._seen(worker_id, streams)
        return await self._claims.take(ask, streams, worker_id, await self._known_tokens())

    # --- leases --------------------------------------------------------------------------------

    async def extend(
        self, leases: Sequence[Lease], *, always: bool = False
    ) -> list[Lease | LeaseLost]:
        """Keep leases alive; without `always` those of which less than two thirds are left."""
        self.served([lease.queue for lease in leases])
        return await self._extends[always](leases)

    async def _extend(self, always: bool, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        proven = self._proofs(await self._known_tokens())
        checked = [proven(lease) for lease in leases]
        extend = partial(SqlQueue.extend, always=always)
        return await self._by_stream([(each, each) for each in checked], extend)

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Publish news of running attempts."""
        self.served([report.lease.queue for report in reports])
        proven = self._proofs(await self._known_tokens())
        checked = [msgspec.structs.replace(each, lease=proven(each.lease)) for each in reports]
        return await self._by_stream([(each.lease, each) for each in checked], SqlQueue.report)

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases; the messages of what is decided are acknowledged after that."""
        self.served([outcome.lease.queue for outcome in outcomes])
        return await self._settles(outcomes)

    async def _settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        proven = self._proofs(await self._known_tokens())
        checked = [
            outcome
            if (lease := proven(outcome.lease)) is outcome.lease
            else msgspec.structs.replace(outcome, lease=lease)
            for outcome in outcomes
        ]
        verdicts = await self._by_stream([(each.lease, each) for each in checked], SqlQueue.settle)
        decided: dict[str, list[str]] = {}
        back: set[str] = set()
        for outcome, verdict in zip(checked, verdicts, strict=True):
            if isinstance(verdict, LeaseLost):
                continue
            if outcome.lease.handle:
                decided.setdefault(outcome.lease.queue, []).append(outcome.lease.handle)
            if type(verdict) in _SENT_BACK:
                back.add(outcome.lease.queue)
        for stream, message_ids in decided.items():
            await self._transport.done(stream, message_ids)
        for stream in back:
            await self._transport.sent_back(stream)
        return verdicts

    async def is_superseded(self, lease: Lease) -> bool:
        """Whether the message of a lease that was lost is worth nothing any more (P-16).

        It is, unless this very attempt still runs: then somebody else held the wrong token. A job
        of another stream is answered like one that there is not.
        """
        rows = await self._engine.run(PLANE, "get", job_id=lease.job_id)
        if not rows:
            return True
        row = rows[0]
        if stream_of(row["queue"]) != lease.queue:
            return True
        return bool(row["claim_version"] != lease.fence or row["lease_expires_at"] == 0)

    async def latest(self, job_id: str) -> tuple[str, int] | None:
        """The stream of a job and the fence of its latest claim."""
        rows = await self._engine.run(PLANE, "get", job_id=job_id)
        return (stream_of(rows[0]["queue"]), rows[0]["claim_version"]) if rows else None

    # --- jobs ----------------------------------------------------------------------------------

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs in their streams."""
        answers: list[Submitted | None] = [None] * len(jobs)
        placed: dict[str, list[tuple[int, NewJob]]] = {}
        for at, job in enumerate(jobs):
            options = dict(job.options)
            stream = options.pop("stream", None) or self.streams[0]
            if stream not in self._boxes:
                answers[at] = Submitted("", "invalid", self._unknown(stream))
                continue
            if job.priority and not self._has_priority:
                answers[at] = Submitted("", "invalid", _NO_PRIORITY)
                continue
            new = msgspec.structs.replace(job, options=options)
            placed.setdefault(stream, []).append((at, new))
        for stream, numbered in placed.items():
            stored = await self._boxes[stream].submit([job for _, job in numbered])
            for (at, _), answer in zip(numbered, stored, strict=True):
                answers[at] = answer
            await self._transport.sent_back(stream)
            self._line.wake(stream)
        return [answer for answer in answers if answer is not None]

    # --- upkeep --------------------------------------------------------------------------------

    def start(self) -> None:
        """Reap, promote, sweep beside the requests, until `close`; several planes may."""
        if self._rounds is None and self.options.upkeep_ms:
            self._rounds = asyncio.create_task(self._keep_up())

    async def upkeep(
        self, worker_id: str = "", *, slots: int = 0, streams: Sequence[str] = ()
    ) -> Upkeep:
        """One round over these streams, or over all and the messages of all."""
        chosen = tuple(streams) or self.streams
        if worker_id:
            await self._seen(_SAFE_ID.sub("-", worker_id)[:200], chosen, slots=slots)
        rounds = [await self._chores[stream].upkeep() for stream in chosen]
        if chosen == self.streams:
            await self._transport.upkeep()
        for stream, done in zip(chosen, rounds, strict=True):
            if done.promoted or done.reclaimed:
                await self._transport.sent_back(stream)
                self._line.wake(stream)
        totals = zip(*(msgspec.structs.astuple(done) for done in rounds), strict=True)
        return Upkeep(*(sum(column) for column in totals))

    async def _keep_up(self) -> None:
        away = False
        while True:
            try:
                await self.upkeep()
                away = False
            except StoreError as error:
                if not away:
                    warn("the plane's upkeep waits for its store", error=str(error))
                away = True
            await asyncio.sleep(self.options.upkeep_ms / 1000 * random.uniform(0.75, 1.25))

    def drain(self) -> None:
        """Answer those who wait."""
        self._line.end()

    async def close(self) -> None:
        """Let go of connections."""
        rounds, self._rounds = self._rounds, None
        if rounds is not None:
            rounds.cancel()
            await asyncio.gather(rounds, return_exceptions=True)
        await self._line.close()
        await self._claims.close()
        await self._transport.close()
        await self._engine.close()

    # --- parts ---------------------------------------------------------------------------------

    def served(self, streams: Sequence[str]) -> tuple[str, ...]:
        """The streams asked for, or all; raises for one that this plane does not have."""
        for stream in streams:
            if stream not in self._boxes:
                raise UsageError(self._unknown(stream), contract=CONTRACT)
        return tuple(dict.fromkeys(streams)) or self.streams

    def _unknown(self, stream: str) -> str:
        return f"no stream {str(stream)[:120]!r}; this plane serves {', '.join(self.streams)}"

    def _delay(self, outcome: Outcome) -> tuple[int, bool]:
        """After how many milliseconds a `fail` runs again, and whether it may."""
        failure = outcome.failure
        if outcome.delay_ms:
            return outcome.delay_ms, failure is None or failure.retryable
        policy = exponential(self.options.retry_delay_ms)
        wait_ms = delay_ms(policy, outcome.lease.attempt, random.random())
        return wait_ms, failure is None or failure.retryable

    async def _known_tokens(self) -> Tokens:
        if self._tokens is None:
            async with self._reading_tokens:
                if self._tokens is None:
                    self._tokens = await read_tokens(self._engine)
        return self._tokens

    @staticmethod
    def _proofs(tokens: Tokens) -> Callable[[Lease], Lease]:
        """Gives a lease back, with a token that fits nothing if it was for another stream."""

        def proven(lease: Lease) -> Lease:
            if tokens.is_of(lease.queue, lease.token):
                return lease
            return msgspec.structs.replace(lease, token=f"not-of-this-stream:{lease.token}")

        return proven

    async def _seen(self, worker_id: str, streams: tuple[str, ...], *, slots: int = 0) -> None:
        """Note now and then that a worker lives, and at once when it says something new."""
        now = asyncio.get_running_loop().time()
        beaten, told = self._beaten.get(worker_id, (float("-inf"), 0))
        if now - beaten < _BEAT_S and slots in (0, told):
            return
        if len(self._beaten) >= _BEATEN_MAX:
            self._beaten.clear()
        self._beaten[worker_id] = (now, slots or told)
        queue = queue_of(streams[0])
        await self._engine.run(PLANE, "beat", queue=queue, worker_id=worker_id, slots=slots)

    async def _by_stream(
        self,
        items: Sequence[tuple[Lease, T]],
        call: Callable[[SqlQueue, Sequence[T]], Awaitable[list[R]]],
    ) -> list[R]:
        """Call the box of each item's stream with its items; answers in the order of the items."""
        placed: dict[str, list[int]] = {}
        for at, (lease, _) in enumerate(items):
            placed.setdefault(lease.queue, []).append(at)
        answers: dict[int, R] = {}
        for stream, places in placed.items():
            given = await call(self._boxes[stream], [items[at][1] for at in places])
            answers.update(zip(places, given, strict=True))
        return [answers[at] for at in range(len(items))]
