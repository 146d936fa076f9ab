"""Claims leases, and waits where BullMQ's workers wait while the queue has nothing to do."""

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
from tenure.contracts.bullmq.records import number
from tenure.contracts.bullmq.schedulers import Picked, Scheduler
from tenure.contracts.bullmq.scripts import BATCH_MAX, Scripts
from tenure.core.errors import ReplyLost, ServerError, StoreError, StoreUnreachable, TenureError
from tenure.core.job import short_hash
from tenure.core.lease import Lease
from tenure.core.outcome import Failure, Outcome, Verdict
from tenure.core.seam import Quarantined
from tenure.store.redis import Arg, Redis

_BLOCK_S = 5.0
_HELD_MAX = 100_000
# The row of a job with a history, a scheduler or a decided failure is longer (see claim-16.lua).
_PLAIN_LENGTH, _SCHEDULER, _DECIDED = 7, 10, 11
_SUSPECT_FROM = 2  # as claim-16.lua counts
_UNREADABLE = "The record cannot be read: "

Settle = Callable[[Sequence[Outcome]], Awaitable[list[Verdict]]]


class Claims:
    """The claims of one worker on one queue, under one token. `url` leads to the connection that
    waits and carries the worker's name; "" uses the given one for everything."""

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
        # The name, which BullMQ shows as `processedBy`, follows the id.
        self._worker = f"{worker_id} {options.name}" if options.name else worker_id
        self._token, self._token_h = token
        self._held: dict[str, None] = {}
        self._suspect: Lease | None = None
        self._suspect_over = asyncio.Event()
        self._answer_lost = False
        self._search_at = 0.0
        self._asking = asyncio.Lock()
        # Connections that block carry the worker's name: that is how Node's getWorkers() finds it.
        named = client_name(options, options.name or worker_id)
        self._redis = redis
        self._waiting = Redis(url, name=named) if url else redis
        self._announced = not url
        self._marker = MarkerListener(self._waiting, scripts.keys.marker)
        self._scheduler = Scheduler(redis, scripts)
        self._unfollowed: list[tuple[str, Picked]] = []

    async def claim(self, limit: int, wait_ms: int, settle: Settle) -> list[Lease]:
        """Up to `limit` leases; `settle` ends those whose failure was decided elsewhere."""
        if not self._announced:
            await self._announce()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            async with self._asking:  # one at a time: a call under way is not a lost answer
                state, now, due, limited_ms, last, rows, aside = await self._ask(limit)
                self._scripts.note(aside)
                leases = [self._lease(row, now + self._options.lease_ms) for row in rows]
            await self._follow_schedules(rows)
            if leases:
                if any(len(row) > _PLAIN_LENGTH and row[_DECIDED] for row in rows):
                    leases = await self._fail_decided(leases, rows, settle)
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
                await self._until_mended(self._listen_paused(last, remaining_ms))
            else:
                wait = min(remaining_ms, due - now) if due else remaining_ms
                listening = self._marker.wait(wait / 1000, until_ms=now + wait)
                if state == b"held":
                    listening = self._wait_held(listening)
                await self._until_mended(listening)

    def forget(self, job_id: str) -> None:
        """The lease has ended: a claim that looks for lost answers need not pass over it."""
        self._held.pop(job_id, None)
        if self._suspect is not None and self._suspect.job_id == job_id:
            self._suspect = None
            self._suspect_over.set()

    async def close(self) -> None:
        """Stop waiting, and close the connection that waits if it is its own."""
        await self._marker.close()
        if self._waiting is not self._redis:
            await self._waiting.close()

    async def _until_mended(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Wait; a key of another type that is waited on is put aside."""
        try:
            await waiting
        except ServerError as error:
            await self._scripts.mend(error)

    async def _announce(self) -> None:
        """Open the connection that carries the worker's name: it is seen before it waits."""
        self._announced = True
        await self._waiting.block("PING", wait_ms=1_000)

    def _note_suspect(self, leases: Sequence[Lease]) -> None:
        """Remember the one lease whose job lost its worker so often that it may kill it (B-54)."""
        for lease in leases:
            if claimed_of(lease).stalled >= _SUSPECT_FROM:
                self._suspect = lease
                self._suspect_over.clear()

    async def _wait_held(self, listening: Coroutine[Any, Any, None]) -> None:
        """Only suspects wait, and this worker runs one: wait for its end, or for the marker."""
        waits = {
            asyncio.ensure_future(listening),
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
                self._suspect = None  # it is no longer ours

    async def _ask(self, limit: int) -> Any:
        recover = self._answer_lost
        # Set before asking: whatever ends this call early, the next one looks for what it took.
        self._answer_lost = True
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
            int(self._time_to_search()),
            int(recover),
        )
        reply = await self._scripts.run("claim", *args, *(self._held if recover else ()))
        self._answer_lost = False
        return reply

    async def _fail_decided(
        self, leases: Sequence[Lease], rows: Sequence[Any], settle: Settle
    ) -> list[Lease]:
        """A failure that was decided elsewhere ends the job at pickup (B-17): it was lost too
        often, a child failed, a cancel was asked for, or its record cannot be read (B-55).
        Returns the leases that are left."""
        ends: list[Outcome] = []
        for lease, row in zip(leases, rows, strict=True):
            if len(row) > _PLAIN_LENGTH and row[_DECIDED]:
                failure = _failure(row[_DECIDED].decode(errors="replace"))
                kind: Literal["cancel", "bury"] = (
                    "cancel" if failure.code == "cancelled" else "bury"
                )
                ends.append(Outcome(lease, kind, failure=failure))
                if failure.code == "unreadable":
                    self._scripts.quarantined.append(Quarantined(lease.job_id, failure.message))
        try:
            await settle(ends)
        except TenureError as error:  # the others of this claim run all the same
            _warn("decided failures are settled later", jobs=len(ends), error=str(error))
        ended = {outcome.lease.job_id for outcome in ends}
        return [lease for lease in leases if lease.job_id not in ended]

    def _time_to_search(self) -> bool:
        """Now and then a claim also looks for locks that ran out; upkeep does it as well."""
        now = asyncio.get_running_loop().time()
        if now < self._search_at:
            return False
        self._search_at = now + min(1.0, self._options.lease_ms / 4_000)
        return True

    async def _follow_schedules(self, rows: Sequence[Any]) -> None:
        """A job that a scheduler made leads to the next one when it is picked up (B-39).

        The claim succeeds in any case: a step that the store did not answer is repeated by the next
        claim, and a next run that cannot be computed here is left to Node.
        """
        for row in rows:
            if len(row) > _PLAIN_LENGTH and row[_SCHEDULER]:
                job = Picked(row[0].decode(), row[1], row[2], row[3])
                self._unfollowed.append((row[_SCHEDULER].decode(errors="replace"), job))
        while self._unfollowed:
            scheduler_id, job = self._unfollowed[0]
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
            except Exception as error:  # options of another program; whatever they break
                _warn(
                    "the next run of a scheduler cannot be computed here; the job itself runs",
                    queue=self._options.queue,
                    scheduler=scheduler_id,
                    job=job.job_id,
                    error=str(error),
                )
            del self._unfollowed[0]

    async def _listen_paused(self, last: bytes, wait_ms: float) -> None:
        """While paused, wait for an event: a resume, or a 5.x client that adds a job (B-34)."""
        wait = max(1, int(wait_ms))
        events = self._scripts.keys.events
        await self._waiting.block(
            "XREAD", "COUNT", 1, "BLOCK", wait, "STREAMS", events, last, wait_ms=wait
        )

    def _lease(self, row: list[Any], lease_until_ms: int) -> Lease:
        job_id = row[0].decode()
        self._held[job_id] = None
        if len(self._held) > _HELD_MAX:  # only leases that were lost unsettled stay here
            del self._held[next(iter(self._held))]
        options = read_options(row[3])
        made, stalled, stack = _history(row)
        attempts = options.attempts or self._options.max_attempts
        return Lease(
            job_id=job_id,
            queue=self._options.queue,
            task=row[1].decode(errors="replace"),
            payload=row[2],
            # A stalled start is no attempt to BullMQ: it raises the count and the limit alike.
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
    """What settling a lease needs and the claim brought: starts that stalled, the job's options as
    read and as stored, the stacks of earlier attempts, the hash of the token."""

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
    """What travels in `Lease.extra`; of a lease that was made otherwise nothing is known."""
    if isinstance(lease.extra, Claimed):
        return lease.extra
    return Claimed(0, JobOptions(), b"", short_hash(lease.token.encode()))


class MarkerListener:
    """Waits for BullMQ's `marker`, a sorted set to which producers add when there is work.

    The member "0" says that there is work, "1" when the next delayed job is due. Popping takes it
    away from every other worker, so a member that arrives when no claim waits is given back. The
    server ends a blocking call up to a tenth of a second late; a timer of our own is exact, and
    leaves the call pending for the next wait.
    """

    def __init__(self, redis: Redis, marker: str) -> None:
        self._redis = redis
        self._marker = marker
        self._pending: asyncio.Task[Any] | None = None
        self._given_back: asyncio.Task[None] | None = None
        self._listeners = 0

    async def wait(self, wait_s: float, *, until_ms: float) -> None:
        """Return when there may be work, or when the time is up, which is `until_ms` there."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        self._listeners += 1
        try:
            while (left_s := deadline - loop.time()) > 0:
                popped = await self._popped(left_s)
                if popped is None or popped[1] == b"0":
                    return
                # A due time: the wait ends then at the latest.
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
        if self._given_back is not None:
            await asyncio.gather(self._given_back, return_exceptions=True)

    async def _popped(self, wait_s: float) -> Any:
        """What was popped from the marker, or None when nothing was in time."""
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
            self._given_back = asyncio.create_task(self._give_back(task.result()))

    async def _give_back(self, popped: Any) -> None:
        with contextlib.suppress(StoreError):
            await self._redis.call("ZADD", self._marker, popped[2], popped[1])


def _warn(event: str, **facts: Any) -> None:
    import structlog  # needed here alone: a command that only looks at a queue does without it

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
    """Ended attempts, stalled starts and earlier stacks, which only a job with a history has."""
    return (number(row[7]), number(row[8]), row[9]) if len(row) > _PLAIN_LENGTH else (0, 0, b"")
