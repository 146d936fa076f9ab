"""The `omniq` contract on the seam: the data that real OmniQ clients share, by our own scripts.

A job is a hash, its turn an id in `{queue}:wait`, in a group's own list or in `{queue}:delayed`,
its lease a token in the hash and a deadline in `{queue}:active`. Other OmniQ clients may share the
queue at any time: everything they and their monitor read is written as they write it. What each
script does and which clauses it serves is said at the head of every file in `lua/`.
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
from tenure.core.errors import LeaseLost
from tenure.core.job import NewJob, Submitted, short_hash
from tenure.core.lease import Lease, Report
from tenure.core.outcome import COMPLETED, Failure, Outcome, Verdict, verdict_of
from tenure.core.seam import Quarantined, QueueFeatures, Upkeep
from tenure.store.redis import Arg, Redis
from tenure.store.redis_queue import (
    BATCH_MAX,
    Quarantine,
    check_reports,
    error_code,
    extended,
    in_batches,
    safe_worker_id,
    submit_valid,
)

_TEND_MAX = 100
_HELD_MAX = 100_000
_BLOCK_MS = 5_000
_PAUSED_POLL_MS = 200
_ERROR_BYTES_MAX = 4096
_WORKER_AGE_MS = 3_600_000
_NULL_H = short_hash(b"null")
# Event types that followers take for a state of the job.
_RESERVED_EVENTS = frozenset({"wait", "active", "delayed", "completed", "failed"})


class Claimer:
    """Claims for one instance of a queue: one at a time, and none is lost with its answer.

    Our own publishers append to the stream `{queue}:wake`. Other OmniQ clients do not, so a waiting
    claim also looks every `poll_ms`.
    """

    def __init__(self, calls: Calls, options: Options, worker_id: str) -> None:
        self.quarantine = Quarantine()
        self._held: dict[str, None] = {}  # the ids of leases that this instance knows of
        self._calls = calls
        self._options = options
        self._worker_id = worker_id
        self._wake_key = f"{queue_base(options.queue)}:wake"
        self._listening: asyncio.Task[Any] | None = None
        # One claim at a time: a second one could not tell what the first is about to hold.
        self._asking = asyncio.Lock()
        self._answer_lost = False
        self._number = 0

    async def once(self, limit: int, *, now_ms: int = 0, tends: bool = True) -> Any:
        """One claim: (state, now_ms, last wake id, next due_ms, lease rows, set aside)."""
        async with self._asking:
            recover = self._answer_lost
            self._number += 1
            # Set before asking: whatever ends this call early, the next one undoes what it took.
            self._answer_lost = True
            reply = await self._calls.run(
                "claim",
                now_ms,
                self._worker_id,
                min(limit, BATCH_MAX),
                self._calls.instance,
                self._number,
                secrets.token_hex(16),
                _TEND_MAX if tends else 0,
                jitter(),
                self._options.keep_completed,
                self._options.keep_failed,
                int(recover),
                *(self._held if recover else ()),
            )
            self._answer_lost = False
            self.set_aside(reply[5])
            for row in reply[4]:
                self._held[row[0].decode()] = None
            while len(self._held) > _HELD_MAX:  # only leases that were lost unsettled stay here
                del self._held[next(iter(self._held))]
            return reply

    async def wait(self, limit: int, wait_ms: int) -> list[Any]:
        """Lease rows, at least one unless `wait_ms` runs out first."""
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
            await self._listen(min(left_ms, poll_ms), woken)

    def set_aside(self, rows: list[bytes]) -> None:
        """Remember records that a script has set aside: id, newline, reason."""
        for row in rows:
            job_id, _, reason = row.partition(b"\n")
            self.quarantine.add(job_id, reason)

    def release(self, job_id: str) -> None:
        """The lease is over."""
        self._held.pop(job_id, None)

    async def close(self) -> None:
        """Stop listening."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self, wait_ms: float, last: bytes) -> None:
        """Return when the wake stream has an entry after `last`, or when the time is up.

        One blocking read stays pending over many calls, so that polling needs no new one.
        """
        task = self._listening
        if task is None or task.done():
            task = self._listening = asyncio.create_task(self._read_wake(last))
        done, _ = await asyncio.wait({task}, timeout=wait_ms / 1000)
        if done and task.exception() is not None:
            self._listening = None
            await asyncio.sleep(min(wait_ms, 50) / 1000)  # the next claim tells what is wrong

    async def _read_wake(self, after: bytes) -> Any:
        read = ("XREAD", "COUNT", 1, "BLOCK", _BLOCK_MS, "STREAMS", self._wake_key, after)
        return await self._calls.redis.block(*read, wait_ms=_BLOCK_MS)


class OmniqQueue:
    """A queue of the contract, for one event loop. `worker_id` is the name it works under."""

    def __init__(self, redis: Redis, options: Options, *, worker_id: str = "") -> None:
        self._redis = redis
        self._options = options
        self.name = options.queue
        self._task = options.task or options.queue
        self.worker_id = safe_worker_id(worker_id)
        self.slots = 0
        self._calls = Calls(redis, options.queue)
        self._claimer = Claimer(self._calls, options, self.worker_id)

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; an id or idempotency key seen before answers with the job it stands for."""
        options = self._options
        shapes: dict[Any, Shape] = {}

        async def send(batch: Sequence[Publication]) -> list[Submitted]:
            limits = (options.max_depth, options.idempotency_ttl_s * 1000)
            reply = await self._calls.remembered("publish", (0,), *limits, *script_args(batch))
            return answers(reply, batch, options)

        return await submit_valid(jobs, lambda job: from_new_job(job, options, shapes), send)

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases; woken by our publishers, and looking often for others'."""
        if limit < 1:
            return []
        return [self._lease(row) for row in await self._claimer.wait(limit, wait_ms)]

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Keep leases for the job's whole timeout from now; writes nothing while most is left."""

        async def send(batch: Sequence[Lease]) -> list[Lease | LeaseLost]:
            args = [arg for lease in batch for arg in _proof(lease)]
            replies = await self._calls.run("extend", 0, self.worker_id, 1, *args)
            return [
                lost(lease.job_id, reply[1]) if reply[0] == b"lost" else extended(lease, *reply)
                for lease, reply in zip(batch, replies, strict=True)
            ]

        return await in_batches(leases, send)

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Append to the jobs' own event streams, and keep their progress."""
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
            replies = await self._calls.remembered(
                "settle", (0, self.worker_id), *keep, jitter(), "", *args
            )
            for outcome in batch:
                self._claimer.release(outcome.lease.job_id)
            pairs = zip(batch, replies, strict=True)
            return [_verdict(outcome.lease, reply) for outcome, reply in pairs]

        return await in_batches(outcomes, send)

    async def upkeep(self) -> Upkeep:
        """Promote, take back, trim; every worker may do it as often as it likes."""
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
        self._claimer.set_aside(reply[6])
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
        )

    def take_quarantined(self) -> list[Quarantined]:
        """Records that could not be read and were set aside since the last call."""
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
    """A random number for a script, which has none of its own."""
    return secrets.randbelow(1_000_000) / 1_000_000


def _proof(lease: Lease) -> tuple[Arg, ...]:
    return (lease.job_id, lease.token, lease.fence)


def _settle_args(outcome: Outcome) -> tuple[Arg, ...]:
    """What the settle script takes for one outcome."""
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
    """The error for people, which OmniQ keeps as `last_error`."""
    if failure is None:
        return ""
    said = f"{failure.code}: {failure.message}".encode()[:_ERROR_BYTES_MAX]
    return said.decode(errors="ignore")


def _verdict(lease: Lease, reply: Any) -> Verdict:
    if reply == 1:
        return COMPLETED
    kind, detail = reply
    return lost(lease.job_id, detail) if kind == b"lost" else verdict_of(kind.decode(), detail)
