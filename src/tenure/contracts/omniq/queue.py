"""The `omniq` contract on the seam: OmniQ's data in Redis, written by our own scripts.

A job is a hash. Its id waits in `{queue}:wait`, in a group's own list or in `{queue}:delayed`. Its
lease is a token in the hash and a deadline in `{queue}:active`. Other OmniQ clients may use the
same queue at any time, so our scripts write everything that they and their monitor read. The header
of each script in `lua/` says what it does.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from tenure.contracts.omniq.calls import Calls
from tenure.contracts.omniq.options import CONTRACT, Options, lost, queue_base
from tenure.contracts.omniq.repair import repair
from tenure.contracts.omniq.submission import (
    Publication,
    Shape,
    answers,
    from_new_job,
    script_args,
)
from tenure.core.encoding import short_hash
from tenure.core.errors import LeaseLost
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import COMPLETED, Failure, Outcome, Verdict, verdict_of
from tenure.core.seam import Quarantined, QueueFeatures, Upkeep
from tenure.plans.schedule import StoredSchedules
from tenure.store.redis import Arg, Redis
from tenure.store.redis_queue import (
    BATCH_MAX,
    ClaimTracker,
    Quarantine,
    check_reports,
    error_code,
    extended,
    in_batches,
    safe_worker_id,
    submit_valid,
)
from tenure.store.redis_records import RedisRecords

_UPKEEP_MAX = 100
_BLOCK_MS = 5_000
_PAUSED_POLL_MS = 200
_ERROR_BYTES_MAX = 4096
_WORKER_AGE_MS = 3_600_000
_NULL_H = short_hash(b"null")
# Event types that followers read as a state of the job.
_RESERVED_EVENTS = frozenset({"wait", "active", "delayed", "completed", "failed"})


class OmniqClaimer:
    """Claims for one instance of a queue.

    Our own publishers append to the stream `{queue}:wake`. Other OmniQ clients do not, so a waiting
    claim also polls every `poll_ms`.
    """

    def __init__(self, calls: Calls, options: Options, worker_id: str) -> None:
        self.quarantine = Quarantine()
        self._claims = ClaimTracker(calls.instance)
        self._calls = calls
        self._options = options
        self._worker_id = worker_id
        self._wake_key = f"{queue_base(options.queue)}:wake"
        self._wake_read: asyncio.Task[Any] | None = None

    async def once(self, limit: int, *, now_ms: int = 0, with_upkeep: bool = True) -> Any:
        """One claim: (state, now_ms, last wake id, next due_ms, lease rows, quarantined).

        With `with_upkeep` it first promotes due jobs and takes back expired leases.
        """
        await self._claims.take_turn()
        try:
            recover, held = self._claims.begin()
            reply = await self._calls.run(
                "claim",
                now_ms,
                self._worker_id,
                min(limit, BATCH_MAX),
                self._claims.instance,
                self._claims.number,
                secrets.token_hex(16),
                _UPKEEP_MAX if with_upkeep else 0,
                jitter(),
                self._options.keep_completed,
                self._options.keep_failed,
                recover,
                *held,
            )
            self._claims.answered(row[0].decode() for row in reply[4])
        finally:
            self._claims.end_turn()
        self.add_quarantined(reply[5])
        return reply

    async def wait(self, limit: int, wait_ms: int) -> list[Any]:
        """Claim until there is a lease row or `wait_ms` is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            state, now, woken, due, rows, _ = await self.once(limit)
            left_ms = (deadline - loop.time()) * 1000
            if rows or left_ms <= 0:
                return list(rows)
            poll_ms = _PAUSED_POLL_MS if state == b"paused" else self._options.poll_ms
            if due and state == b"ok":
                poll_ms = min(poll_ms, max(1, due - now))
            await self._wait_for_wake(min(left_ms, poll_ms), woken)

    def add_quarantined(self, rows: list[bytes]) -> None:
        """Remember records that a script has quarantined: id, newline, reason."""
        for row in rows:
            job_id, _, reason = row.partition(b"\n")
            self.quarantine.add(job_id, reason)

    def release(self, job_id: str) -> None:
        """The lease has ended."""
        self._claims.release(job_id)

    async def close(self) -> None:
        """Cancel the blocking read."""
        if self._wake_read is not None:
            self._wake_read.cancel()
            await asyncio.gather(self._wake_read, return_exceptions=True)

    async def _wait_for_wake(self, wait_ms: float, last: bytes) -> None:
        """Return when the wake stream has an entry after `last`, or when the time is up.

        One blocking read stays pending over many calls, so that polling needs no new one.
        """
        task = self._wake_read
        if task is not None and task.done() and not task.cancelled():
            task.exception()  # read here so that it is not logged: the next claim raises the error
            task = None
        if task is None or task.done():
            task = self._wake_read = asyncio.create_task(self._read_wake(last))
        done, _ = await asyncio.wait({task}, timeout=wait_ms / 1000)
        if done and task.exception() is not None:
            self._wake_read = None
            await asyncio.sleep(min(wait_ms, 50) / 1000)  # the next claim raises the error

    async def _read_wake(self, after: bytes) -> Any:
        read = ("XREAD", "COUNT", 1, "BLOCK", _BLOCK_MS, "STREAMS", self._wake_key, after)
        return await self._calls.redis.block(*read, wait_ms=_BLOCK_MS)


class OmniqQueue:
    """A queue of the contract, for one event loop. `worker_id` is written into its leases."""

    def __init__(self, redis: Redis, options: Options, *, worker_id: str = "") -> None:
        self._redis = redis
        self._options = options
        self.name = options.queue
        self._task = options.task or options.queue
        self.worker_id = safe_worker_id(worker_id)
        self.slots = 0
        self._calls = Calls(redis, options.queue)
        self._claimer = OmniqClaimer(self._calls, options, self.worker_id)
        self._schedules = StoredSchedules(RedisRecords(redis, f"{queue_base(options.queue)}:"))

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; a known id or idempotency key is answered with the job that has it."""
        options = self._options
        shapes: dict[Any, Shape] = {}

        async def send(batch: Sequence[Publication]) -> list[Submitted]:
            limits = (options.max_depth, options.idempotency_ttl_s * 1000)
            args = (*limits, *script_args(batch))
            reply = await self._calls.run_once("publish", (0,), *args, replicated=True)
            return answers(reply, batch, options)

        return await submit_valid(jobs, lambda job: from_new_job(job, options, shapes), send)

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases; our publishers wake it, and it polls for jobs of others."""
        if limit < 1:
            return []
        return [self._lease(row) for row in await self._claimer.wait(limit, wait_ms)]

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Extend leases to the job's timeout from now; the script skips leases that are fresh."""

        async def send(batch: Sequence[Lease]) -> list[Lease | LeaseLost]:
            args = [arg for lease in batch for arg in _proof(lease)]
            replies = await self._calls.run("extend", 0, self.worker_id, 1, *args)
            return [
                lost(lease.job_id, reply[1]) if reply[0] == b"lost" else extended(lease, *reply)
                for lease, reply in zip(batch, replies, strict=True)
            ]

        return await in_batches(leases, send)

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Append to the jobs' own event streams, and store their progress."""
        check_reports(reports, _RESERVED_EVENTS, CONTRACT)

        async def send(batch: Sequence[Report]) -> list[LeaseLost | None]:
            args: list[Arg] = []
            for report in batch:
                args += _proof(report.lease)
                args += (report.type, report.step, report.data, report.progress)
            replies = await self._calls.run("report", 0, self.worker_id, *args)
            return [
                None if reply == 1 else lost(report.lease.job_id, reply[1])
                for report, reply in zip(batch, replies, strict=True)
            ]

        return await in_batches(reports, send)

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases: one step for the whole batch, a verdict for each."""

        async def send(batch: Sequence[Outcome]) -> list[Verdict]:
            keep = (self._options.keep_completed, self._options.keep_failed)
            args = [arg for outcome in batch for arg in _settle_args(outcome)]
            replies = await self._calls.run_once(
                "settle", (0, self.worker_id), *keep, jitter(), "", *args
            )
            for outcome in batch:
                self._claimer.release(outcome.lease.job_id)
            pairs = zip(batch, replies, strict=True)
            return [_verdict(outcome.lease, reply) for outcome, reply in pairs]

        return await in_batches(outcomes, send)

    async def upkeep(self) -> Upkeep:
        """Promote due jobs, take back expired leases, trim; safe to call from every worker."""
        options = self._options
        reply = await self._calls.run(
            "upkeep",
            0,
            self.worker_id,
            jitter(),
            options.journal_bytes,
            round(options.journal_days * 86_400_000),
            _WORKER_AGE_MS,
            options.keep_completed,
            options.keep_failed,
            self.slots,
            round(max(options.journal_days, options.unread_days) * 86_400_000),
        )
        self._claimer.add_quarantined(reply[6])
        if reply[5]:
            await repair(self._calls, options.queue)
        return Upkeep(*reply[:5])

    @property
    def features(self) -> QueueFeatures:
        """What it has beyond the seam."""
        return QueueFeatures(
            lease_ms=self._options.timeout_ms,
            claim_max=BATCH_MAX,
            take_quarantined=self.take_quarantined,
            contract=CONTRACT,
            schedules=self._schedules,
        )

    def take_quarantined(self) -> list[Quarantined]:
        """Records quarantined since the last call."""
        return self._claimer.quarantine.take()

    async def close(self) -> None:
        """Close the connections."""
        await self._claimer.close()
        await self._redis.close()

    def _lease(self, row: list[Any]) -> Lease:
        job_id, payload, until, attempt, max_attempts, gid, token, fence, task, *rest = row
        created, trace, lease_ms = rest
        return Lease(
            job_id=job_id.decode(),
            queue=self._options.queue,
            task=task.decode(errors="replace") or self._task,
            payload=payload,
            attempt=attempt,
            max_attempts=max_attempts,
            fence=fence,
            token=token.decode(),
            lease_until_ms=until,
            lease_ms=lease_ms,
            created_ms=created,
            gid=gid.decode(errors="replace"),
            trace=trace.decode(errors="replace"),
        )


def jitter() -> float:
    """A random number for a script: `math.random` of Redis starts from the same seed each time."""
    return secrets.randbelow(1_000_000) / 1_000_000


def _proof(lease: Lease) -> tuple[Arg, ...]:
    return (lease.job_id, lease.token, lease.fence)


def _settle_args(outcome: Outcome) -> tuple[Arg, ...]:
    """The arguments of the settle script for one outcome."""
    proof = _proof(outcome.lease)
    if outcome.kind == "complete":
        result = outcome.result
        result_h = _NULL_H if result == b"null" else short_hash(result)
        return (*proof, "complete", 0, result, result_h, "", "", "")
    failure = outcome.failure
    as_json = msgspec.json.encode(failure) if failure else ""
    error = (_last_error(failure), as_json, error_code(failure))
    return (*proof, outcome.kind, outcome.delay_ms, "", "", *error)


def _last_error(failure: Failure | None) -> str:
    """The text that OmniQ keeps as `last_error`."""
    if failure is None:
        return ""
    if failure.code == "cancelled":
        return failure.code
    return cut_error(f"{failure.code}: {failure.message}")


def cut_error(text: str) -> str:
    """An error text of at most the length that OmniQ keeps."""
    return text.encode(errors="replace")[:_ERROR_BYTES_MAX].decode(errors="ignore")


def _verdict(lease: Lease, reply: Any) -> Verdict:
    if reply == 1:
        return COMPLETED
    kind, detail = reply
    return lost(lease.job_id, detail) if kind == b"lost" else verdict_of(kind.decode(), detail)
