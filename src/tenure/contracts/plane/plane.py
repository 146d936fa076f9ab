"""The control plane: it owns the state of its jobs and hands out leases.

A claim looks into its streams in order and waits if they are empty. The transport says which job is
next; one statement writes lease, attempt and state. A settle is committed in the database before
the message is acknowledged. Several planes may serve one database: none keeps state in memory that
another one needs.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from tenure.contracts.plane import MACHINE
from tenure.contracts.plane.claims import Claims, Tokens, Waiters, read_tokens
from tenure.contracts.plane.model import CONTRACT, Claim, PlaneOptions, queue_of, stream_of, warn
from tenure.contracts.plane.queue import PlaneQueue, WorkerFlows
from tenure.contracts.plane.transports import MessageTransport, RowTransport, Transport, calls_max
from tenure.core.errors import LeaseLost, StoreError, UsageError
from tenure.core.job import Children, NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Released, Retried, Verdict
from tenure.core.retry import delay_ms, exponential
from tenure.core.seam import Quarantined, QueueFeatures, Schedules, Upkeep
from tenure.plans.flow import StoredFlows, continued, stage_before, step_of
from tenure.plans.schedule import StoredSchedules
from tenure.sql.engine import PLANE, Engine
from tenure.sql.records import SqlRecords
from tenure.sql.sql_queue import SqlQueue
from tenure.sql.upkeep import Upkeeper
from tenure.store.batcher import Batcher
from tenure.store.redis import Redis

T = TypeVar("T")
R = TypeVar("R")

_SAFE_ID = re.compile(r"[^A-Za-z0-9_.:@-]")
_HEARTBEAT_S = 5.0
_WORKERS_MAX = 20_000
_BATCH_MAX = 500
RESULTS_CHARS_MAX = 32 << 20
"""Of the jobs that a job waited for, over HTTP: they are in the gateway's memory together."""
_AHEAD_MS = 2_000  # so long before its time a job of a schedule is stored: two rounds of upkeep
_NO_PRIORITY = (
    "a Redis stream has one order, so a job of this plane has no priority: choose another stream"
)


class LatestLease(NamedTuple):
    """The latest claim of a job; `is_held` while its lease has not ended."""

    stream: str
    fence: int
    is_held: bool


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
        self._queues = {
            stream: SqlQueue(
                engine,
                settings[stream],
                worker_id=self._id,
                delay=self._delay,
                finals=frozenset(MACHINE.final),
            )
            for stream in self.streams
        }
        self._upkeepers = {name: Upkeeper(engine, settings[name], "") for name in self.streams}
        self._transport: Transport = RowTransport(engine, settings, self._upkeepers)
        if redis is not None:
            self._transport = MessageTransport(
                engine,
                redis,
                settings,
                self._upkeepers,
                consumer=self._id,
                namespace=options.namespace,
                resend_ms=options.resend_ms,
            )
        self._records = SqlRecords(engine, PLANE, queue_of(self.streams[0]))
        self.schedules: Schedules = StoredSchedules(self._records)
        self.flows = StoredFlows(self._records, self.submit)
        self._has_priority = redis is None
        calls = calls_max(engine)
        self._extends: dict[bool, Batcher[Lease, Lease | LeaseLost]] = {
            always: Batcher(partial(self._extend, always), items_max=_BATCH_MAX, calls_max=calls)
            for always in (False, True)
        }
        self._settles: Batcher[Outcome, Verdict] = Batcher(
            self._settle, items_max=_BATCH_MAX, calls_max=calls
        )
        self._waiters = Waiters(self._transport.listener)
        self._claims = Claims(
            engine, self._transport, self._waiters, self.settle, fair_every=options.fair_every
        )
        self._tokens: Tokens | None = None
        self._reading_tokens = asyncio.Lock()
        self._heartbeats: dict[str, tuple[float, int]] = {}
        self._upkeep_task: asyncio.Task[None] | None = None

    def take_quarantined(self) -> list[Quarantined]:
        """The unreadable jobs that were buried since the last call."""
        quarantined, self._claims.quarantined = self._claims.quarantined, []
        return quarantined

    # --- claims --------------------------------------------------------------------------------

    async def claim(self, claim: Claim) -> list[Lease]:
        """Take leases, waiting for the first; the leases of a lost answer come first."""
        if claim.limit < 1:
            return []
        streams = self.check_streams(claim.streams)
        worker_id = _SAFE_ID.sub("-", claim.worker_id)[:200] or "anon"
        await self._note_worker(worker_id, streams)
        return await self._claims.take(claim, streams, worker_id, await self._read_tokens())

    # --- leases --------------------------------------------------------------------------------

    async def extend(
        self, leases: Sequence[Lease], *, always: bool = False
    ) -> list[Lease | LeaseLost]:
        """Unless `always`, extends only leases with under two thirds of their time left."""
        self.check_streams([lease.queue for lease in leases])
        return await self._extends[always](leases)

    async def _extend(self, always: bool, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        tokens = await self._read_tokens()
        checked = [_invalidate_foreign_token(lease, tokens) for lease in leases]
        extend = partial(SqlQueue.extend, always=always)
        return await self._by_stream([(each, each) for each in checked], extend)

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Store reports of running attempts."""
        self.check_streams([report.lease.queue for report in reports])
        tokens = await self._read_tokens()
        checked = [
            msgspec.structs.replace(report, lease=_invalidate_foreign_token(report.lease, tokens))
            for report in reports
        ]
        return await self._by_stream([(each.lease, each) for each in checked], SqlQueue.report)

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases in the database, then acknowledge their messages.

        The next jobs of a chain are stored before, if the lease is held.
        """
        self.check_streams([outcome.lease.queue for outcome in outcomes])
        completed = (each for each in outcomes if each.kind == "complete")
        steps = [each for each in completed if step_of(each.lease.job_id) is not None]
        if steps:
            held = await self.extend([step.lease for step in steps])
            after = {
                step.lease.job_id: await continued(self.flows, step)
                for step, lease in zip(steps, held, strict=True)
                if not isinstance(lease, LeaseLost)
            }
            outcomes = [after.get(each.lease.job_id, each) for each in outcomes]
        return await self._settles(outcomes)

    async def children(self, lease: Lease) -> Children:
        """The results of the jobs that a running job waited for; raises `LeaseLost`."""
        await self._check_held(lease)
        return await self.flows.children(lease)

    async def children_results(self, lease: Lease) -> dict[str, str]:
        """The same as JSON texts, which a gateway passes on; refused if they are too large."""
        await self._check_held(lease)
        stage = stage_before(lease.job_id)
        size = await self._records.chars(stage.group) if stage is not None else 0
        if size > RESULTS_CHARS_MAX:
            raise UsageError(
                f"the results of the jobs before have {size} characters together, and a plane over "
                f"HTTP gives at most {RESULTS_CHARS_MAX}: return references to large results",
                contract=CONTRACT,
            )
        return await self.flows.results(lease)

    async def _check_held(self, lease: Lease) -> None:
        (held,) = await self.extend([lease])
        if isinstance(held, LeaseLost):
            raise held

    async def _settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        tokens = await self._read_tokens()
        # The leases of one claim share their token, so each token is checked once.
        shown = {(outcome.lease.queue, outcome.lease.token) for outcome in outcomes}
        if not all(tokens.is_of(*each) for each in shown):
            outcomes = [
                msgspec.structs.replace(each, lease=_invalidate_foreign_token(each.lease, tokens))
                for each in outcomes
            ]
        verdicts = await self._by_stream([(each.lease, each) for each in outcomes], SqlQueue.settle)
        messages: dict[str, list[str]] = {}
        requeued: set[str] = set()
        for outcome, verdict in zip(outcomes, verdicts, strict=True):
            if isinstance(verdict, LeaseLost):
                continue
            lease = outcome.lease
            if lease.handle:
                messages.setdefault(lease.queue, []).append(lease.handle)
            if isinstance(verdict, Released | Retried):
                requeued.add(lease.queue)
        for stream, message_ids in messages.items():
            await self._transport.acknowledge(stream, message_ids)
        for stream in requeued:
            await self._transport.note_requeued(stream)
        return verdicts

    async def are_superseded(self, leases: Sequence[Lease]) -> list[bool]:
        """Whether the messages of lost leases may be acknowledged (P-16).

        They may, unless this very attempt is still running: then the caller had a wrong token. A
        job of another stream is treated like one that does not exist.
        """
        latest = await self.latest_leases([lease.job_id for lease in leases])
        return [
            latest.get(lease.job_id) != LatestLease(lease.queue, lease.fence, True)
            for lease in leases
        ]

    async def latest_leases(self, job_ids: Sequence[str]) -> dict[str, LatestLease]:
        """The latest lease of each job that exists, by job id."""
        if not job_ids:
            return {}
        rows = await self._engine.run(PLANE, "plane_leases", [(job_id,) for job_id in job_ids])
        return {
            row["job_id"]: LatestLease(
                stream_of(row["queue"]), row["claim_version"], row["lease_expires_at"] > 0
            )
            for row in rows
        }

    # --- jobs ----------------------------------------------------------------------------------

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs in their streams."""
        answers: list[Submitted | None] = [None] * len(jobs)
        by_stream: dict[str, list[tuple[int, NewJob]]] = {}
        for at, job in enumerate(jobs):
            options = dict(job.options)
            stream = options.pop("stream", None) or self.streams[0]
            if stream not in self.streams:  # of a tuple, so that it may be anything
                answers[at] = Submitted("", "invalid", self._unknown(stream))
                continue
            if job.priority and not self._has_priority:
                answers[at] = Submitted("", "invalid", _NO_PRIORITY)
                continue
            new = msgspec.structs.replace(job, options=options)
            by_stream.setdefault(stream, []).append((at, new))
        for stream, numbered in by_stream.items():
            stored = await self._queues[stream].submit([job for _, job in numbered])
            for (at, _), answer in zip(numbered, stored, strict=True):
                answers[at] = answer
            await self._transport.note_requeued(stream)
            self._waiters.wake(stream)
        return [answer for answer in answers if answer is not None]

    # --- upkeep --------------------------------------------------------------------------------

    def start(self) -> None:
        """Run upkeep in the background until `close`; several planes may do so."""
        if self._upkeep_task is None and self.options.upkeep_ms:
            self._upkeep_task = asyncio.create_task(self._run_upkeep())

    async def upkeep(
        self, worker_id: str = "", *, slots: int = 0, streams: Sequence[str] = ()
    ) -> Upkeep:
        """One round over these streams, or over all streams and their messages."""
        chosen = tuple(streams) or self.streams
        if worker_id:
            await self._note_worker(_SAFE_ID.sub("-", worker_id)[:200], chosen, slots=slots)
        rounds = [await self._upkeepers[stream].upkeep() for stream in chosen]
        if chosen == self.streams:
            await self._transport.upkeep()
        for stream, done in zip(chosen, rounds, strict=True):
            if done.promoted or done.reclaimed:
                await self._transport.note_requeued(stream)
                self._waiters.wake(stream)
        if chosen == self.streams:  # last: a schedule of another program may raise anything
            await self.schedules.enqueue_due(self.submit, _AHEAD_MS)
        totals = zip(*(msgspec.structs.astuple(done) for done in rounds), strict=True)
        return Upkeep(*(sum(column) for column in totals))

    async def _run_upkeep(self) -> None:
        is_unreachable = False
        while True:
            try:
                await self.upkeep()
                is_unreachable = False
            except StoreError as error:
                if not is_unreachable:
                    warn("the plane's upkeep waits for its store", error=str(error))
                is_unreachable = True
            except Exception as error:  # no record may end the upkeep of all streams
                warn("the plane's upkeep failed and is tried again", error=repr(error))
            await asyncio.sleep(self.options.upkeep_ms / 1000 * random.uniform(0.75, 1.25))

    def drain(self) -> None:
        """Answer all claims that wait."""
        self._waiters.end()

    async def close(self) -> None:
        """Close the connections."""
        task, self._upkeep_task = self._upkeep_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._waiters.close()
        await self._claims.close()
        await self._transport.close()
        await self._engine.close()

    # --- helpers -------------------------------------------------------------------------------

    def check_streams(self, streams: Sequence[str]) -> tuple[str, ...]:
        """These streams without repetitions, or all; raises for one that this plane lacks."""
        for stream in streams:
            if stream not in self._queues:
                raise UsageError(self._unknown(stream), contract=CONTRACT)
        return tuple(dict.fromkeys(streams)) or self.streams

    def _unknown(self, stream: str) -> str:
        return f"no stream {str(stream)[:120]!r}; this plane serves {', '.join(self.streams)}"

    def _delay(self, outcome: Outcome) -> tuple[int, bool]:
        """After how many milliseconds a failed job runs again, and whether it may."""
        failure = outcome.failure
        if outcome.delay_ms:
            return outcome.delay_ms, failure is None or failure.retryable
        policy = exponential(self.options.retry_delay_ms)
        wait_ms = delay_ms(policy, outcome.lease.attempt, random.random())
        return wait_ms, failure is None or failure.retryable

    async def _read_tokens(self) -> Tokens:
        if self._tokens is None:
            async with self._reading_tokens:
                if self._tokens is None:
                    self._tokens = await read_tokens(self._engine)
        return self._tokens

    async def _note_worker(
        self, worker_id: str, streams: tuple[str, ...], *, slots: int = 0
    ) -> None:
        """Store that a worker is alive: every few seconds, and at once when its slots changed."""
        now = asyncio.get_running_loop().time()
        sent_at, sent_slots = self._heartbeats.get(worker_id, (float("-inf"), 0))
        if now - sent_at < _HEARTBEAT_S and slots in (0, sent_slots):
            return
        if len(self._heartbeats) >= _WORKERS_MAX:
            self._heartbeats.clear()
        self._heartbeats[worker_id] = (now, slots or sent_slots)
        queue = queue_of(streams[0])
        await self._engine.run(PLANE, "heartbeat", queue=queue, worker_id=worker_id, slots=slots)

    async def _by_stream(
        self,
        items: Sequence[tuple[Lease, T]],
        call: Callable[[SqlQueue, Sequence[T]], Awaitable[list[R]]],
    ) -> list[R]:
        """Call the queue of each item's stream; answers are in the order of the items."""
        by_stream: dict[str, list[int]] = {}
        for at, (lease, _) in enumerate(items):
            by_stream.setdefault(lease.queue, []).append(at)
        answers: dict[int, R] = {}
        for stream, positions in by_stream.items():
            replies = await call(self._queues[stream], [items[at][1] for at in positions])
            answers.update(zip(positions, replies, strict=True))
        return [answers[at] for at in range(len(items))]


def _invalidate_foreign_token(lease: Lease, tokens: Tokens) -> Lease:
    """Replace a token from another stream with one that cannot match."""
    if tokens.is_of(lease.queue, lease.token):
        return lease
    return msgspec.structs.replace(lease, token=f"not-of-this-stream:{lease.token}")


class LocalFlows(WorkerFlows):
    """The flows of a plane of this process: here a flow can also be started."""

    def __init__(self, plane: Plane) -> None:
        super().__init__(plane)
        self._plane = plane

    async def start(self, flow_id: str, stages: Sequence[Sequence[NewJob]]) -> Sequence[Submitted]:
        """Store a flow in the first stream."""
        return await self._plane.flows.start(flow_id, stages)

    async def before(self, job_id: str) -> Sequence[str]:
        """The jobs that a job of a later stage, which is not stored yet, waits for."""
        return await self._plane.flows.before(job_id)


class LocalQueue(PlaneQueue):
    """The queue over a plane of this process; a gateway starts and drains it."""

    def __init__(self, plane: Plane, *, worker_id: str = "") -> None:
        super().__init__(plane, streams=plane.streams, worker_id=worker_id)
        self.plane = plane
        self._flows = LocalFlows(plane)

    @property
    def features(self) -> QueueFeatures:
        """What it has beyond the seam."""
        return msgspec.structs.replace(
            super().features,
            take_quarantined=self.plane.take_quarantined,
            start=self.plane.start,
            drain=self.plane.drain,
            flows=self._flows,
        )
