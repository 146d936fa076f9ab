"""The `bullmq` contract on the seam: the data real BullMQ keeps in Redis, by scripts of our own.

A job is a hash, its turn an id in `wait`, `prioritized` or `delayed`, its lease the key
`<id>:lock`. Node workers and producers may share the queue at any time: everything they read is
written as they write it. What they do not know (the journal, one field of the job) stands beside
it. What the scripts do and which clause each serves stands at the head of every file in `lua/`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from tenure.contracts.bullmq import reporting, submission
from tenure.contracts.bullmq.claimed import token_h_of
from tenure.contracts.bullmq.claiming import Claims
from tenure.contracts.bullmq.family import Children, read_children
from tenure.contracts.bullmq.options import Options
from tenure.contracts.bullmq.outcomes import custom_backoff
from tenure.contracts.bullmq.restoring import restore
from tenure.contracts.bullmq.scripts import BATCH_MAX, Scripts
from tenure.contracts.bullmq.settling import Settles
from tenure.core.errors import LeaseLost, UsageError
from tenure.core.job import NewJob, Submitted, short_hash
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.seam import Quarantined, Upkeep
from tenure.store.redis import Arg, Redis
from tenure.store.resending import part

_WORKER_ID_UNSAFE = re.compile(r"[^A-Za-z0-9_.:@-]")


class BullmqQueue:
    """A queue of the contract, for one event loop. `worker_id` is the name it works under."""

    claim_max = BATCH_MAX
    has_children = True
    """A handler may let its job wait for children that it added (`Park`)."""
    has_data = True
    """A handler may replace its job's data (`Job.update_data`)."""

    def __init__(
        self, redis: Redis, options: Options, *, worker_id: str = "", url: str = ""
    ) -> None:
        self._redis = redis
        self._options = options
        self._scripts = Scripts(redis, options)
        self.worker_id = _WORKER_ID_UNSAFE.sub("-", worker_id) or f"anon-{secrets.token_hex(6)}"
        self.slots = 0
        secret = secrets.token_urlsafe(16)
        token = (secret, short_hash(secret.encode()))
        self._claims = Claims(
            redis, self._scripts, options, worker_id=self.worker_id, token=token, url=url
        )
        self._settles = Settles(self._scripts, options, worker_id=self.worker_id, token=token)

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; an id or idempotency key seen before answers with the job it stands for."""
        answers: list[Submitted | None] = [None] * len(jobs)
        accepted: list[int] = []
        rows: list[tuple[Arg, ...]] = []
        for position, job in enumerate(jobs):
            try:
                rows.append(submission.row(job, self._options))
                accepted.append(position)
            except UsageError as error:
                answers[position] = Submitted("", "invalid", str(error))
        for start in range(0, len(accepted), BATCH_MAX):
            args = [arg for row in rows[start : start + BATCH_MAX] for arg in row]
            head = ("", self._options.max_depth, self._options.idempotency_ttl_s * 1000)
            replies = await part(start, self._scripts.run("add", *head, *args))
            for position, (status, job_id) in zip(
                accepted[start : start + BATCH_MAX], replies, strict=True
            ):
                answers[position] = submission.answer(
                    status.decode(), job_id.decode(), self._options
                )
        return [answer for answer in answers if answer is not None]

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases; waits where BullMQ's workers do, and is woken as they are."""
        return await self._claims.claim(limit, wait_ms, self.settle) if limit > 0 else []

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Renew locks; asks for little when most of the lease is left."""
        answers: list[Lease | LeaseLost] = []
        for start in range(0, len(leases), BATCH_MAX):
            chunk = leases[start : start + BATCH_MAX]
            args: list[Arg] = []
            for lease in chunk:
                args += (lease.job_id, lease.fence, lease.token, lease.attempt, token_h_of(lease))
            head = (self.worker_id, self._options.lease_ms)
            replies = await part(start, self._scripts.run("extend", *head, *args))
            answers += [_extended(*pair) for pair in zip(chunk, replies, strict=True)]
        return answers

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Write progress and lines of the log, and publish events to the queue's followers."""
        for report in reports:
            reporting.check(report)
        answers: list[LeaseLost | None] = []
        for start in range(0, len(reports), BATCH_MAX):
            chunk = reports[start : start + BATCH_MAX]
            args = [arg for each in chunk for arg in reporting.row(each)]
            replies = await part(start, self._scripts.run("report", self.worker_id, *args))
            answers += [
                None if reply[0] == b"ok" else LeaseLost(each.lease.job_id, reply[1].decode())
                for each, reply in zip(chunk, replies, strict=True)
            ]
        return answers

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases: one step for the whole batch, a verdict for each."""
        verdicts = await self._settles.settle(outcomes)
        for outcome in outcomes:
            self._claims.forget(outcome.lease.job_id)
        return verdicts

    async def children(self, job_id: str) -> Children:
        """The children of a job: what each of them left, and which are still to come."""
        return await read_children(self._redis, self._options.key_prefix + job_id)

    def custom_backoff(self, lease: Lease) -> tuple[str, int] | None:
        """A backoff that only a function of the task can know, and how many attempts were made."""
        return custom_backoff(lease)

    async def upkeep(self) -> Upkeep:
        """Promote, take back, trim; every worker may do it as often as it likes."""
        options = self._options
        reply = await self._scripts.run(
            "upkeep",
            options.stalled_max,
            options.stalled_ms,
            options.journal_bytes,
            round(options.journal_days * 86_400_000),
            self.worker_id,
            self.slots,
            round(max(options.journal_days, options.unread_days) * 86_400_000),
        )
        self._scripts.note(reply[5])
        if reply[6]:
            await restore(self._redis, self._scripts, options.key_prefix)
        return Upkeep(*reply[:5])

    def take_quarantined(self) -> list[Quarantined]:
        """What was set aside since the last call."""
        taken, self._scripts.quarantined = self._scripts.quarantined, []
        return taken

    async def close(self) -> None:
        """Close the connections."""
        await self._claims.close()
        await self._redis.close()


def _extended(lease: Lease, reply: list[Any]) -> Lease | LeaseLost:
    if reply[0] != b"ok":
        return LeaseLost(lease.job_id, reply[1].decode())
    return msgspec.structs.replace(
        lease, lease_until_ms=reply[1], cancel_requested=bool(reply[2]), lease_ms=reply[3]
    )
