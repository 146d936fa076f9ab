"""The `omniq` contract on the seam: the data real OmniQ clients share, by scripts of our own.

A job is a hash, its turn an id in `{queue}:wait`, in a group's own list or in `{queue}:delayed`,
its lease a token in the hash and a deadline in `{queue}:active`. Other OmniQ clients may share the
queue at any time: everything they and their monitor read is written as they write it. What the
scripts do and which clause each serves stands at the head of every file in `lua/`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from tenure.contracts.omniq.calls import SCRIPTS, Calls
from tenure.contracts.omniq.claiming import BATCH_MAX, Claimer, chance
from tenure.contracts.omniq.errors import lost
from tenure.contracts.omniq.options import Options
from tenure.contracts.omniq.outcomes import settle_args, verdict_of
from tenure.contracts.omniq.repairing import repair
from tenure.contracts.omniq.submission import (
    Publication,
    Shapes,
    answers,
    from_new_job,
    script_args,
)
from tenure.core.errors import LeaseLost, UsageError
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.seam import Quarantined, Upkeep
from tenure.store.redis import Arg, Redis
from tenure.store.resending import part

_WORKER_AGE_MS = 3_600_000
_WORKER_ID_UNSAFE = re.compile(r"[^A-Za-z0-9_.:@-]")
# Words that followers take for a state of the job.
RESERVED_EVENTS = frozenset({"wait", "active", "delayed", "completed", "failed"})


class OmniqQueue:
    """A queue of the contract, for one event loop. `worker_id` is the name it works under."""

    claim_max = BATCH_MAX

    def __init__(self, redis: Redis, options: Options, *, worker_id: str = "") -> None:
        self._redis = redis
        self._options = options
        self.name = options.queue
        self._task = options.task or options.queue
        # The id stands between blanks in a field of the job, so it keeps to harmless characters.
        self.worker_id = _WORKER_ID_UNSAFE.sub("-", worker_id) or f"anon-{secrets.token_hex(6)}"
        self.lease_ms = options.timeout_ms
        self.slots = 0
        self._calls = Calls(redis, options.queue)
        self._claimer = Claimer(self._calls, options, self.worker_id)

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; an id or idempotency key seen before answers with the job it stands for."""
        told: list[Submitted | None] = [None] * len(jobs)
        accepted: list[int] = []
        rows: list[Publication] = []
        shapes = Shapes(self._options)
        for position, job in enumerate(jobs):
            try:
                rows.append(from_new_job(job, shapes))
                accepted.append(position)
            except UsageError as error:
                told[position] = Submitted("", "invalid", str(error))
        for start in range(0, len(accepted), BATCH_MAX):
            chunk = rows[start : start + BATCH_MAX]
            publish = self._calls.remembered(
                "publish",
                (0,),
                self._options.max_depth,
                self._options.idempotency_ttl_s * 1000,
                *script_args(chunk),
            )
            reply = await part(start, publish)
            for position, answer in zip(
                accepted[start : start + BATCH_MAX],
                answers(reply, chunk, self._options),
                strict=True,
            ):
                told[position] = answer
        return [each for each in told if each is not None]

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases; woken by our publishers, and looking often for others'."""
        if limit < 1:
            return []
        return [self._lease(row) for row in await self._claimer.wait(limit, wait_ms)]

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Keep leases for the job's whole timeout from now; writes nothing while most is left."""
        answers: list[Lease | LeaseLost] = []
        for start in range(0, len(leases), BATCH_MAX):
            chunk = leases[start : start + BATCH_MAX]
            args: list[Arg] = []
            for lease in chunk:
                args += (lease.job_id, lease.token, lease.fence)
            replies = await part(start, self._calls.run("extend", 0, self.worker_id, 1, *args))
            answers += [_extended(*pair) for pair in zip(chunk, replies, strict=True)]
        return answers

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Append to the jobs' own event streams, and keep their progress."""
        for report in reports:
            if report.type in RESERVED_EVENTS:
                raise UsageError(
                    f"a handler cannot report {report.type!r}: followers take it for the job's "
                    "state; choose another word"
                )
        answers: list[LeaseLost | None] = []
        for start in range(0, len(reports), BATCH_MAX):
            chunk = reports[start : start + BATCH_MAX]
            args: list[Arg] = []
            for report in chunk:
                lease = report.lease
                args += (lease.job_id, lease.token, lease.fence)
                args += (report.type, report.step, report.data, report.progress)
            replies = await part(start, self._calls.run("report", 0, self.worker_id, *args))
            answers += [
                None if reply == 1 else lost(report.lease.job_id, reply[1])
                for report, reply in zip(chunk, replies, strict=True)
            ]
        return answers

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases: one step for the whole batch, a verdict for each."""
        verdicts: list[Verdict] = []
        for start in range(0, len(outcomes), BATCH_MAX):
            chunk = outcomes[start : start + BATCH_MAX]
            args: list[Arg] = []
            for outcome in chunk:
                args += settle_args(outcome)
            settle = self._calls.remembered(
                "settle",
                (0, self.worker_id),
                self._options.keep_completed,
                self._options.keep_failed,
                chance(),
                "",
                *args,
            )
            replies = await part(start, settle)
            for outcome, reply in zip(chunk, replies, strict=True):
                self._claimer.release(outcome.lease.job_id)
                verdicts.append(verdict_of(outcome.lease, reply))
        return verdicts

    async def upkeep(self) -> Upkeep:
        """Promote, take back, trim; every worker may do it as often as it likes."""
        options = self._options
        reply = await self._calls.run(
            "upkeep",
            0,
            self.worker_id,
            chance(),
            options.journal_bytes,
            round(options.journal_days * 86_400_000),
            _WORKER_AGE_MS,
            options.keep_completed,
            options.keep_failed,
            self.slots,
            round(max(options.journal_days, options.unread_days) * 86_400_000),
        )
        self._claimer.told(reply[6])
        if reply[5]:
            await repair(self._calls, options.queue)
        return Upkeep(*reply[:5])

    def take_quarantined(self) -> list[Quarantined]:
        """Records that could not be read and were set aside since the last call."""
        return self._claimer.take_quarantined()

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


def _extended(lease: Lease, reply: list[Any]) -> Lease | LeaseLost:
    if reply[0] == b"lost":
        return lost(lease.job_id, reply[1])
    return msgspec.structs.replace(
        lease, lease_until_ms=reply[0], cancel_requested=bool(reply[1]), lease_ms=reply[2]
    )


__all__ = ["RESERVED_EVENTS", "SCRIPTS", "OmniqQueue"]
