"""Taking leases: asking the store, and waiting where BullMQ's workers wait while it has nothing.

An ordinary claim is `take`, a short script; whatever is not ordinary (a lost answer to recover, a
limit, a pause, jobs that are due, locks to look for) goes through `claim`, which does everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal

from tenure.contracts.bullmq import job_options
from tenure.contracts.bullmq.bell import Bell
from tenure.contracts.bullmq.claimed import Claimed
from tenure.contracts.bullmq.options import Options, client_name
from tenure.contracts.bullmq.records import number
from tenure.contracts.bullmq.scheduling import Picked, Scheduler
from tenure.contracts.bullmq.scripts import BATCH_MAX, Scripts
from tenure.core.errors import ReplyLost, ServerError, StoreUnreachable, TenureError
from tenure.core.lease import Lease
from tenure.core.outcome import Failure, Outcome, Verdict
from tenure.core.seam import Quarantined
from tenure.store.redis import Arg, Redis

_HELD_MAX = 100_000
# Where a job with a history, a scheduler or a decided failure has more to say (see claim-16.lua).
_PLAIN_LENGTH, _SCHEDULER, _DECIDED = 7, 10, 11

_SUSPECT_FROM = 2  # as start.lua counts
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
        self._bell = Bell(self._waiting, scripts.keys[7])
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
                rung = self._bell.wait(wait / 1000, until_ms=now + wait)
                await self._until_mended(self._wait_held(rung) if state == b"held" else rung)

    def forget(self, job_id: str) -> None:
        """The lease has ended: a claim that looks for lost answers need not pass over it."""
        self._held.pop(job_id, None)
        if self._suspect is not None and self._suspect.job_id == job_id:
            self._suspect = None
            self._suspect_over.set()

    async def close(self) -> None:
        """Stop waiting, and close the connection that waits if it is its own."""
        await self._bell.close()
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
            if isinstance(lease.extra, Claimed) and lease.extra.stalled >= _SUSPECT_FROM:
                self._suspect = lease
                self._suspect_over.clear()

    async def _wait_held(self, rung: Coroutine[Any, Any, None]) -> None:
        """Only suspects wait, and this worker runs one: until it has ended, or the marker rings."""
        waits = {
            asyncio.ensure_future(rung),
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
        search = self._time_to_search()
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
        )
        reply = 0
        if not (recover or search or options.limit_max):
            reply = await self._scripts.run("take", *args)
        if not reply:
            held = self._held if recover else ()
            reply = await self._scripts.run("claim", *args, int(search), int(recover), *held)
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
        """A job that a scheduler made leads to the next one, whoever picks it up (B-39).

        The claim stands whatever comes of it: a step that the store did not answer is repeated by
        the next claim, and a next run that cannot be computed here is left to Node.
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
        """While paused, the events are heard: a resume, and a 5.x client that adds a job (B-34)."""
        wait = max(1, int(wait_ms))
        events = self._scripts.keys[6]
        await self._waiting.block(
            "XREAD", "COUNT", 1, "BLOCK", wait, "STREAMS", events, last, wait_ms=wait
        )

    def _lease(self, row: list[Any], lease_until_ms: int) -> Lease:
        job_id = row[0].decode()
        self._held[job_id] = None
        if len(self._held) > _HELD_MAX:  # only leases that were lost unsettled stay here
            del self._held[next(iter(self._held))]
        options = job_options.read(row[3])
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
            extra=Claimed(made, stalled, options, stack, self._token_h, row[3]),
        )


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
