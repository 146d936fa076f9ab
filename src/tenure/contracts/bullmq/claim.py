"""Claims leases, and waits for BullMQ's `marker` while the queue is empty."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal

import msgspec

from tenure.contracts.bullmq.options import (
    JobOptions,
    Options,
    client_name,
    read_options,
    unpack_options,
)
from tenure.contracts.bullmq.schedulers import PickedJob, Scheduler
from tenure.contracts.bullmq.scripts import Scripts
from tenure.core.encoding import short_hash
from tenure.core.errors import ReplyLost, ServerError, StoreError, StoreUnreachable, TenureError
from tenure.core.lease import Lease
from tenure.core.outcome import Failure, Outcome, Verdict
from tenure.store.redis import Arg, Redis
from tenure.store.redis_queue import BATCH_MAX, number

_BLOCK_S = 5.0
_HELD_MAX = 100_000
# The row of a job with a history, a scheduler or a deferred failure is longer (see claim-16.lua).
_PLAIN_LENGTH, _SCHEDULER, _DEFERRED = 7, 10, 11
# A suspect is a job that may have killed its worker. A worker runs one suspect at a time (B-54).
_SUSPECT_FROM = 2  # lost workers; the same number as in claim-16.lua
_UNREADABLE = "The record cannot be read: "

Settle = Callable[[Sequence[Outcome]], Awaitable[list[Verdict]]]


class BullmqClaimer:
    """Claims for one worker on one queue, under one token.

    `url` is for the connection that blocks and carries the worker's name; "" uses `redis` for that.
    """

    def __init__(
        self,
        redis: Redis,
        scripts: Scripts,
        options: Options,
        *,
        worker_id: str,
        token: tuple[str, str],
        url: str,
    ) -> None:
        self._scripts = scripts
        self._options = options
        # BullMQ shows the name as `processedBy`.
        self._worker = f"{worker_id} {options.name}" if options.name else worker_id
        self._token, self._token_h = token
        self._held: dict[str, None] = {}
        self._suspect: Lease | None = None
        self._suspect_over = asyncio.Event()
        self._reply_lost = False
        self._reap_at = 0.0
        self._claim_lock = asyncio.Lock()
        # Node's getWorkers() finds a worker by the name of its blocking connection (B-31).
        named = client_name(options, options.name or worker_id)
        self._redis = redis
        self._blocking_redis = Redis(url, name=named) if url else redis
        self._announced = not url
        self._marker = MarkerListener(self._blocking_redis, scripts.keys.marker)
        self._scheduler = Scheduler(redis, scripts)
        # Schedulers, each with its job that was claimed, whose next job is not stored yet.
        self._unscheduled: list[tuple[str, PickedJob]] = []

    async def claim(self, limit: int, wait_ms: int, settle: Settle) -> list[Lease]:
        """Up to `limit` leases; `settle` ends those that have a deferred failure."""
        if not self._announced:
            await self._announce()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            async with self._claim_lock:  # a claim under way must not pass for a lost reply
                state, now, due, limited_ms, last, rows, quarantined = await self._run_claim(limit)
                self._scripts.note(quarantined)
                leases = [self._lease(row, now + self._options.lease_ms) for row in rows]
            await self._follow_schedules(rows)
            if leases:
                if any(len(row) > _PLAIN_LENGTH and row[_DEFERRED] for row in rows):
                    leases = await self._settle_deferred(leases, rows, settle)
                    if not leases:
                        continue
                self._note_suspect(leases)
                return leases
            remaining_ms = (deadline - loop.time()) * 1000
            if remaining_ms <= 0:
                return []
            if limited_ms:
                await asyncio.sleep(min(remaining_ms, limited_ms) / 1000)
            elif state == b"paused":
                await self._mend_after(self._wait_paused(last, remaining_ms))
            else:
                wait = min(remaining_ms, due - now) if due else remaining_ms
                waiting = self._marker.wait(wait / 1000, until_ms=now + wait)
                if state == b"held":
                    waiting = self._wait_held(waiting)
                await self._mend_after(waiting)

    def forget(self, job_id: str) -> None:
        """The lease has ended."""
        self._held.pop(job_id, None)
        if self._suspect is not None and self._suspect.job_id == job_id:
            self._suspect = None
            self._suspect_over.set()

    async def close(self) -> None:
        """Stop waiting, and close the blocking connection if it is its own."""
        await self._marker.close()
        if self._blocking_redis is not self._redis:
            await self._blocking_redis.close()

    async def _mend_after(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Wait; repair the key if it has another type."""
        try:
            await waiting
        except ServerError as error:
            await self._scripts.mend(error)

    async def _announce(self) -> None:
        """Open the connection that carries the worker's name, so that Node sees it at once."""
        self._announced = True
        # A command with a key: on a cluster it goes to the node that has the queue.
        await self._blocking_redis.block("EXISTS", self._scripts.keys.marker, wait_ms=1_000)

    def _note_suspect(self, leases: Sequence[Lease]) -> None:
        """Remember the lease of a suspect: this worker takes no other suspect until it ends."""
        for lease in leases:
            if claimed_of(lease).stalled >= _SUSPECT_FROM:
                self._suspect = lease
                self._suspect_over.clear()

    async def _wait_held(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Wait until this worker's suspect ends or the marker says that there are other jobs."""
        waits = {
            asyncio.ensure_future(waiting),
            asyncio.ensure_future(self._suspect_over.wait()),
        }
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        for each in done:
            each.result()
        suspect = self._suspect
        if suspect is not None:
            key = f"{self._options.key_prefix}{suspect.job_id}:lock"
            (lock,) = await self._redis.pipeline([("GET", key)])
            if lock != f"{suspect.token}:{suspect.fence}".encode():
                self._suspect = None  # the lease was lost

    async def _run_claim(self, limit: int) -> Any:
        recover = self._reply_lost
        # Set before the call: if the call is cut short, the next claim looks for what it took.
        self._reply_lost = True
        options = self._options
        args: tuple[Arg, ...] = (
            self._token,
            self._worker,
            min(limit, BATCH_MAX),
            options.lease_ms,
            options.stalled_max,
            options.limit_max or "",
            options.limit_ms or "",
            self._token_h,
            int(self._suspect is None),
            int(self._is_reap_due()),
            int(recover),
        )
        reply = await self._scripts.run("claim", *args, *(self._held if recover else ()))
        self._reply_lost = False
        return reply

    async def _settle_deferred(
        self, leases: Sequence[Lease], rows: Sequence[Any], settle: Settle
    ) -> list[Lease]:
        """End the jobs that have a deferred failure (B-17); the other leases.

        Such a job lost its lease too often, a child failed it, a cancel was requested, or its
        record cannot be read (B-55).
        """
        quarantine = self._scripts.quarantine
        ends: list[Outcome] = []
        for lease, row in zip(leases, rows, strict=True):
            if len(row) > _PLAIN_LENGTH and row[_DEFERRED]:
                failure = _failure(row[_DEFERRED].decode(errors="replace"))
                kind: Literal["cancel", "bury"] = (
                    "cancel" if failure.code == "cancelled" else "bury"
                )
                ends.append(Outcome(lease, kind, failure=failure))
                if failure.code == "unreadable":
                    quarantine.add(lease.job_id.encode(), failure.message.encode())
        try:
            await settle(ends)
        except TenureError as error:  # the other jobs of this claim run all the same
            _warn("deferred failures are settled later", jobs=len(ends), error=str(error))
        ended = {outcome.lease.job_id for outcome in ends}
        return [lease for lease in leases if lease.job_id not in ended]

    def _is_reap_due(self) -> bool:
        """Whether this claim also looks for locks that ran out, as upkeep does."""
        now = asyncio.get_running_loop().time()
        if now < self._reap_at:
            return False
        self._reap_at = now + min(1.0, self._options.lease_ms / 4_000)
        return True

    async def _follow_schedules(self, rows: Sequence[Any]) -> None:
        """Store the next job of each scheduler whose job was picked up (B-39).

        The claim succeeds in any case. If the store does not answer, the next claim tries again. A
        next run that cannot be computed here is left to Node.
        """
        for row in rows:
            if len(row) > _PLAIN_LENGTH and row[_SCHEDULER]:
                job = PickedJob(row[0].decode(), row[1], row[2], row[3])
                self._unscheduled.append((row[_SCHEDULER].decode(errors="replace"), job))
        while self._unscheduled:
            scheduler_id, job = self._unscheduled[0]
            try:
                await self._scheduler.follow(scheduler_id, job)
            except (StoreUnreachable, ReplyLost) as error:
                _warn(
                    "the next run of a scheduler is not stored yet; the next claim tries again",
                    queue=self._options.queue,
                    scheduler=scheduler_id,
                    error=str(error),
                )
                return
            except Exception as error:  # options of another program may break anything
                _warn(
                    "the next run of a scheduler cannot be computed here; the job itself runs",
                    queue=self._options.queue,
                    scheduler=scheduler_id,
                    job=job.job_id,
                    error=str(error),
                )
            del self._unscheduled[0]

    async def _wait_paused(self, last: bytes, wait_ms: float) -> None:
        """While paused, wait for an event: a resume, or a 5.x client that adds a job (B-34)."""
        wait = max(1, int(wait_ms))
        events = self._scripts.keys.events
        await self._blocking_redis.block(
            "XREAD", "COUNT", 1, "BLOCK", wait, "STREAMS", events, last, wait_ms=wait
        )

    def _lease(self, row: list[Any], lease_until_ms: int) -> Lease:
        job_id = row[0].decode()
        self._held[job_id] = None
        if len(self._held) > _HELD_MAX:  # only leases that were lost stay this long
            del self._held[next(iter(self._held))]
        options = read_options(row[3])
        made, stalled, stack = _history(row)
        attempts = options.attempts or self._options.max_attempts
        return Lease(
            job_id=job_id,
            queue=self._options.queue,
            task=row[1].decode(errors="replace"),
            payload=row[2],
            # To BullMQ a start that stalled is not an attempt: it raises count and limit alike.
            attempt=made + stalled + 1,
            max_attempts=attempts + stalled if attempts else 0,
            fence=int(row[4]),
            token=self._token,
            lease_until_ms=lease_until_ms,
            lease_ms=self._options.lease_ms,
            created_ms=number(row[5]),
            priority=number(row[6]),
            trace=options.trace,
            extra=Claimed(stalled, options, stack, self._token_h, row[3]),
        )


class Claimed(msgspec.Struct, frozen=True):
    """What a settle needs of the claim: starts that stalled, the job's options as read and as
    stored, the stacks of earlier attempts, the hash of the token."""

    stalled: int
    options: JobOptions
    stacktrace: bytes
    token_h: str
    raw_options: bytes = b"{}"

    @property
    def opts(self) -> dict[str, Any]:
        """The job's options under BullMQ's names, which its handler sees as `job.opts`."""
        return unpack_options(self.raw_options)


def claimed_of(lease: Lease) -> Claimed:
    """`Lease.extra`, or defaults for a lease that no claim of this contract made."""
    if isinstance(lease.extra, Claimed):
        return lease.extra
    return Claimed(0, JobOptions(), b"", short_hash(lease.token.encode()))


class MarkerListener:
    """Waits for BullMQ's `marker`, a sorted set to which producers add when there is work.

    The member "0" means that there is work; the score of "1" is when the next delayed job is due. A
    pop takes the member away from all other workers, so one that arrives when no claim waits is
    added again. The server ends a blocking call up to a tenth of a second late. A timer of our own
    is exact, and leaves the call pending for the next wait.
    """

    def __init__(self, redis: Redis, marker: str) -> None:
        self._redis = redis
        self._marker = marker
        self._pending: asyncio.Task[Any] | None = None
        self._returning: asyncio.Task[None] | None = None
        self._listeners = 0

    async def wait(self, wait_s: float, *, until_ms: float) -> None:
        """Return when there may be work or the time is up, at `until_ms` by the server's clock."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        self._listeners += 1
        try:
            while (left_s := deadline - loop.time()) > 0:
                popped = await self._pop(left_s)
                if popped is None or popped[1] == b"0":
                    return
                # The member is a due time, at which the wait ends.
                sooner_s = (until_ms - float(popped[2])) / 1000
                if sooner_s > 0:
                    until_ms = float(popped[2])
                    deadline -= sooner_s
        finally:
            self._listeners -= 1

    async def close(self) -> None:
        """Stop waiting."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)
        if self._returning is not None:
            await asyncio.gather(self._returning, return_exceptions=True)

    async def _pop(self, wait_s: float) -> Any:
        """What was popped from the marker, or None if nothing was in time."""
        task = self._pending
        if task is None or task.done():
            task = self._pending = asyncio.create_task(self._block())
            task.add_done_callback(self._ended)
        done, _ = await asyncio.wait({task}, timeout=wait_s)
        return task.result() if done else None

    async def _block(self) -> Any:
        return await self._redis.block(
            "BZPOPMIN", self._marker, f"{_BLOCK_S:.0f}", wait_ms=round(_BLOCK_S * 1000)
        )

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None or task.result() is None:
            return
        if self._listeners == 0:
            self._returning = asyncio.create_task(self._return_member(task.result()))

    async def _return_member(self, popped: Any) -> None:
        with contextlib.suppress(StoreError):
            await self._redis.call("ZADD", self._marker, popped[2], popped[1])


def _warn(event: str, **facts: Any) -> None:
    import structlog  # slow to import, and commands that only read a queue do not need it

    structlog.get_logger("tenure.bullmq").warning(event, **facts)


def _failure(reason: str) -> Failure:
    if reason == "cancelled":
        code = "cancelled"
    elif reason.startswith(_UNREADABLE):
        code = "unreadable"
    else:
        code = "lease_lost" if "stalled" in reason else "child"
    return Failure(code=code, message=reason, retryable=False)


def _history(row: list[Any]) -> tuple[int, int, bytes]:
    """Ended attempts, stalled starts and earlier stacks; only a job with a history has them."""
    return (number(row[7]), number(row[8]), row[9]) if len(row) > _PLAIN_LENGTH else (0, 0, b"")
