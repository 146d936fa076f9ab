"""A queue over several slots of a cluster, made of one `StreamsQueue` for each of its shards.

The shards share one client, so calls that are made to several of them at the same time are one
write to each node. An idempotency key is kept in the shard that the key names and holds the id of
its job, which may be in another shard. So a job with a key takes two steps: first the key is
reserved for its id, or tells the id that it was reserved for. Then the job is submitted under that
id, and its shard answers whether it is new, the same as before, or in conflict.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain

import msgspec

from tenure.contracts.streams.options import CONTRACT, Options
from tenure.contracts.streams.queue import TERMINAL_EVENTS, StreamsQueue, check_new, ttl_s_of
from tenure.contracts.streams.shards import (
    ShardCheck,
    ShardedRecords,
    gather_all,
    shard_options,
    spread,
)
from tenure.core.errors import LeaseLost, StoreError, UsageError
from tenure.core.job import NewJob, Submitted, new_job_id, scoped_key
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.seam import Quarantined, QueueFeatures, Upkeep
from tenure.plans.flow import StoredFlows
from tenure.plans.schedule import StoredSchedules
from tenure.store.redis import Arg, Redis
from tenure.store.redis_queue import BATCH_MAX, check_reports, safe_worker_id

_SHARE_MIN = 50  # a claim asks fewer shards rather than each of them for fewer leases
_RETRY_S = 0.5
_WATCH_MS_MAX = 5_000


class ShardedQueue:
    """A queue of several shards, for one event loop."""

    def __init__(self, redis: Redis, options: Options, *, worker_id: str = "") -> None:
        self._redis = redis
        self._options = options
        self.worker_id = safe_worker_id(worker_id)
        self.slots = 0
        self._shards = [
            StreamsQueue(redis, each, worker_id=self.worker_id) for each in shard_options(options)
        ]
        self._namespaces = [each.namespace for each in shard_options(options)]
        self._check_shards = ShardCheck(redis, options, begins=True)
        # Workers that start together do not all ask the same shard first.
        self._next = secrets.randbelow(options.shards)
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._failing: set[int] = set()
        self._unclaimed: list[Lease] = []
        records = ShardedRecords(redis, self._namespaces)
        self._schedules = StoredSchedules(records)
        self._flows = StoredFlows(records, self.submit)

    # Submitting.

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs, each in the shard of its id."""
        await self._check_shards()
        named = [
            job if job.job_id else msgspec.structs.replace(job, job_id=new_job_id()) for job in jobs
        ]
        placed = await self._reserve_keys(named)

        async def send(shard: int, part: Sequence[NewJob]) -> list[Submitted]:
            return await self._shards[shard].submit(part)

        return await spread(placed, lambda job: job.job_id, len(self._shards), send)

    async def _reserve_keys(self, jobs: Sequence[NewJob]) -> list[NewJob]:
        """The jobs with the ids that their idempotency keys stand for, and without the keys."""
        placed = list(jobs)
        keyed: dict[int, tuple[str, str, int]] = {}  # the key with its scope, the id, seconds
        for at, job in enumerate(jobs):
            try:
                key = _scoped_key(job)
            except UsageError:
                continue  # its shard refuses it
            if key:
                keep_s = max(ttl_s_of(job, self._options), self._options.idempotency_ttl_s)
                keyed[at] = (key, job.job_id, keep_s)
        count = len(self._shards)
        reserved = await spread([*keyed.values()], lambda each: each[0], count, self._reserve)
        for at, job_id in zip(keyed, reserved, strict=True):
            placed[at] = msgspec.structs.replace(jobs[at], job_id=job_id, idempotency_key="")
        return placed

    async def _reserve(self, shard: int, part: Sequence[tuple[str, str, int]]) -> list[str]:
        """Keep the ids under keys of one shard; the id that each key has from now on."""
        whole: list[tuple[Arg, ...]] = [("MULTI",)]
        for key, job_id, keep_s in part:
            name = f"{self._namespaces[shard]}idempotency:{key}"
            whole += [("SET", name, job_id, "NX", "EX", keep_s), ("GET", name)]
        replies = await self._redis.pipeline([*whole, ("EXEC",)], replicated=True)
        answers = replies[-1] if isinstance(replies[-1], list) else []
        for reply in (*replies, *answers):
            if isinstance(reply, StoreError):
                raise reply
        # A key may have expired between the two commands.
        ids = zip(part, answers[1::2], strict=True)
        return [kept.decode(errors="replace") if kept else given for (_, given, _), kept in ids]

    # Claiming.

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases, from all shards in turn; waits for all of them at once."""
        if limit < 1:
            return []
        await self._check_shards()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        taken, self._unclaimed = self._unclaimed[:limit], self._unclaimed[limit:]
        try:
            while not taken:
                await self._ask(limit, taken, deadline, everyone=wait_ms <= 0)
                if wait_ms > 0:
                    self._watch()
                left_s = deadline - loop.time()
                if taken or left_s <= 0:
                    break
                if self._watches:
                    watches = list(self._watches.values())
                    await asyncio.wait(watches, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:  # the next claim returns what had come before
            self._unclaimed += taken
            raise
        return taken

    async def _ask(
        self, limit: int, taken: list[Lease], deadline: float, *, everyone: bool
    ) -> None:
        """Claim from the shards that may have jobs, as many at once as the limit is worth.

        Adds the leases to `taken`. A shard that has more than its share is asked again as long as
        the others have less. After a round without any, as many are asked as may have one each.
        """
        count, loop = len(self._shards), asyncio.get_running_loop()
        turn = [(self._next + at) % count for at in range(count)]
        ready = [shard for shard in turn if everyone or shard not in self._watches]
        width = max(1, limit // _SHARE_MIN)
        while ready and len(taken) < limit:
            left = limit - len(taken)
            asked, ready = ready[: min(width, left)], ready[min(width, left) :]
            self._next = (asked[-1] + 1) % count
            shares = [left // len(asked) + (at < left % len(asked)) for at in range(len(asked))]
            calls = [
                self._claim_from(shard, share, taken)
                for shard, share in zip(asked, shares, strict=True)
            ]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            if not any(isinstance(answer, int) and answer for answer in answers):
                width = limit
            for shard, answer in zip(asked, answers, strict=True):
                if isinstance(answer, BaseException):
                    self._failed(shard, answer, taken)
                    continue
                self._failing.discard(shard)
                may_have_more = not self._shards[shard].is_empty
                if may_have_more and (answer or loop.time() < deadline):
                    ready.append(shard)

    async def _claim_from(self, shard: int, limit: int, taken: list[Lease]) -> int:
        """Add leases of one shard to `taken`, at once: if the caller is cancelled, none is lost."""
        leases = await self._shards[shard].claim(limit, wait_ms=0)
        taken += leases
        return len(leases)

    def _failed(self, shard: int, error: BaseException, taken: Sequence[Lease]) -> None:
        """Leave a shard that does not answer alone for a moment; the others go on.

        The error is raised when it begins, or if no shard answers, unless there are leases.
        """
        if not isinstance(error, StoreError):
            raise error
        begins = shard not in self._failing
        self._failing.add(shard)
        self._start_watch(shard, partial(asyncio.sleep, _RETRY_S))
        if not taken and (begins or len(self._failing) == len(self._shards)):
            raise error

    def _watch(self) -> None:
        """Wait for jobs in every shard that is empty; until then claims need not ask it.

        A lease that runs out wakes nobody, so that is looked for again within a part of a lease.
        """
        wait_ms = min(_WATCH_MS_MAX, max(1, self._options.lease_ms // 3))
        for number, shard in enumerate(self._shards):
            if shard.is_empty and number not in self._watches:
                self._start_watch(number, partial(shard.wait, wait_ms))

    def _start_watch(self, shard: int, wait: Callable[[], Awaitable[None]]) -> None:
        if shard not in self._watches:
            self._watches[shard] = asyncio.create_task(self._run_watch(shard, wait))

    async def _run_watch(self, shard: int, wait: Callable[[], Awaitable[None]]) -> None:
        try:
            await wait()
        except StoreError:  # the next claim will meet it too, if it lasts
            await asyncio.sleep(_RETRY_S)
        finally:
            del self._watches[shard]

    # Working.

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Extend leases; one whose shard does not answer is returned as the object that it is.

        Raises if no shard answers.
        """
        failures: list[StoreError] = []
        answered = 0

        async def send(shard: int, part: Sequence[Lease]) -> Sequence[Lease | LeaseLost]:
            nonlocal answered
            try:
                answers = await self._shards[shard].extend(part)
            except StoreError as error:
                failures.append(error)
                return part
            answered += 1
            return answers

        answers = await spread(leases, _job_of_lease, len(self._shards), send)
        if failures and not answered:
            raise failures[0]
        return answers

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Append events to the streams of running jobs."""
        check_reports(reports, TERMINAL_EVENTS, CONTRACT)

        async def send(shard: int, part: Sequence[Report]) -> list[LeaseLost | None]:
            return await self._shards[shard].report(part)

        return await spread(reports, _job_of, len(self._shards), send)

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases. If a shard does not answer, all outcomes may be sent again."""

        async def send(shard: int, part: Sequence[Outcome]) -> list[Verdict]:
            return await self._shards[shard].settle(part)

        return await spread(outcomes, _job_of, len(self._shards), send)

    async def upkeep(self) -> Upkeep:
        """Do the upkeep of all shards; one that fails does not keep it from the others."""
        await self._check_shards()
        for shard in self._shards:
            shard.slots = self.slots
        done = await gather_all(shard.upkeep() for shard in self._shards)
        return Upkeep(
            *(sum(counts) for counts in zip(*map(msgspec.structs.astuple, done), strict=True))
        )

    @property
    def features(self) -> QueueFeatures:
        """What it has beyond the seam."""
        return QueueFeatures(
            claim_max=BATCH_MAX * len(self._shards),
            take_quarantined=self.take_quarantined,
            contract=CONTRACT,
            schedules=self._schedules,
            flows=self._flows,
        )

    def take_quarantined(self) -> list[Quarantined]:
        """Records quarantined since the last call."""
        return list(chain.from_iterable(shard.take_quarantined() for shard in self._shards))

    async def close(self) -> None:
        """Close the connections."""
        watches = list(self._watches.values())
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await self._redis.close()


def _job_of_lease(lease: Lease) -> str:
    return lease.job_id


def _job_of(item: Report | Outcome) -> str:
    return item.lease.job_id


def _scoped_key(job: NewJob) -> str:
    """A job's idempotency key with its requester, "" if it has none; raises `InvalidJob`."""
    if not job.idempotency_key:
        return ""
    check_new(job)
    return scoped_key(job.requester, job.idempotency_key)
