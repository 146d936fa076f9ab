"""The `bullmq` contract on the seam: BullMQ's own data in Redis, written by scripts of ours.

A job is a hash. A job that waits is an id in `wait`, `prioritized` or `delayed`. Its lease is the
key `<id>:lock`. Node's workers and producers may share the queue at any time, so the scripts write
everything that Node reads as Node writes it. The journal and one field of the job's hash are ours;
Node ignores them. The header of each file in `lua/` names the clauses of SPEC.md that it serves.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from tenure.contracts.bullmq.claim import BullmqClaimer, claimed_of
from tenure.contracts.bullmq.options import (
    CONTRACT,
    JobOptions,
    Keep,
    Options,
    backoff_ms,
    stack_of,
)
from tenure.contracts.bullmq.plans import BullmqFlows, BullmqSchedules
from tenure.contracts.bullmq.producer import submit_answer, submit_args
from tenure.contracts.bullmq.scripts import Scripts
from tenure.core.encoding import short_hash
from tenure.core.errors import LeaseLost, UsageError
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import COMPLETED, Failure, Outcome, Verdict, verdict_of
from tenure.core.seam import Quarantined, QueueFeatures, Upkeep
from tenure.store.redis import Arg, Redis
from tenure.store.redis_queue import (
    BATCH_MAX,
    check_reports,
    error_code,
    extended,
    lost,
    safe_worker_id,
    submit_valid,
)

_KEEP_ALL = Keep()
# BullMQ's own events.
_RESERVED_EVENTS = frozenset(
    (
        *("added", "waiting", "active", "completed", "failed", "delayed", "drained", "paused"),
        *("resumed", "removed", "stalled", "retries-exhausted", "waiting-children", "duplicated"),
        *("deduplicated", "cleaned", "debounced", "retry"),
    )
)


class BullmqQueue:
    """A queue of the contract, for one event loop. `worker_id` is the name it works under."""

    def __init__(
        self, redis: Redis, options: Options, *, worker_id: str = "", url: str = ""
    ) -> None:
        self._redis = redis
        self._options = options
        self._scripts = Scripts(redis, options)
        self.worker_id = safe_worker_id(worker_id)
        self.slots = 0
        self._schedules = BullmqSchedules(redis, options, self._scripts)
        self._flows = BullmqFlows(redis, options)
        secret = secrets.token_urlsafe(16)
        self._token = (secret, short_hash(secret.encode()))
        self._claimer = BullmqClaimer(
            redis, self._scripts, options, worker_id=self.worker_id, token=self._token, url=url
        )

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; an id or idempotency key seen before answers with the job there is."""
        options = self._options
        head = ("", options.max_depth, options.idempotency_ttl_s * 1000)

        async def send(rows: Sequence[tuple[Arg, ...]]) -> list[Submitted]:
            replies = await self._scripts.run_rows("add", head, rows, replicated=True)
            return [submit_answer(reply, options) for reply in replies]

        return await submit_valid(jobs, submit_args, send)

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases; waits for `marker` while there is none, as Node does."""
        return await self._claimer.claim(limit, wait_ms, self.settle) if limit > 0 else []

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Extend locks; the script writes only when a third of the lease is spent."""
        rows = [
            (lease.job_id, lease.fence, lease.token, lease.attempt, claimed_of(lease).token_h)
            for lease in leases
        ]
        head = (self.worker_id, self._options.lease_ms)
        replies = await self._scripts.run_rows("extend", head, rows)
        return [
            extended(lease, *reply[1:]) if reply[0] == b"ok" else lost(lease, reply[1])
            for lease, reply in zip(leases, replies, strict=True)
        ]

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Write progress and lines of the log, and publish events to the queue's followers."""
        check_reports(reports, _RESERVED_EVENTS, CONTRACT)
        for report in reports:
            _check_progress(report.progress)
        rows = [_report_args(report) for report in reports]
        replies = await self._scripts.run_rows("report", (self.worker_id,), rows)
        return [
            None if reply[0] == b"ok" else lost(report.lease, reply[1])
            for report, reply in zip(reports, replies, strict=True)
        ]

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases: one step for a batch, a verdict for each outcome."""
        options = self._options
        # For jobs whose completion fails because of their children.
        kept_failed = _packed(_default_keep(options.keep_failed, options.keep_failed_s))
        limit_max = options.limit_max or ""
        head = (self.worker_id, *self._token, options.metrics_minutes, limit_max, kept_failed)
        rows = [_settle_args(outcome, options) for outcome in outcomes]
        replies = await self._scripts.run_rows("settle", head, rows)
        for outcome in outcomes:
            self._claimer.forget(outcome.lease.job_id)
        return [
            _verdict(outcome.lease, reply) for outcome, reply in zip(outcomes, replies, strict=True)
        ]

    async def upkeep(self) -> Upkeep:
        """Promote, reclaim, trim; any worker may do it at any time."""
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
            await self._scripts.restore()
        return Upkeep(*reply[:5])

    @property
    def features(self) -> QueueFeatures:
        """What it has beyond the seam."""
        return QueueFeatures(
            claim_max=BATCH_MAX,
            replaces_payload=True,
            take_quarantined=self.take_quarantined,
            parks=True,
            custom_backoff=_custom_backoff,
            job_options=_job_options,
            contract=CONTRACT,
            schedules=self._schedules,
            flows=self._flows,
        )

    def take_quarantined(self) -> list[Quarantined]:
        """Records that were set aside since the last call."""
        return self._scripts.quarantine.take()

    async def close(self) -> None:
        """Close the connections."""
        await self._claimer.close()
        await self._redis.close()


def _settle_args(outcome: Outcome, options: Options) -> tuple[Arg, ...]:
    """The eight arguments of one outcome, in the order of settle-16.lua."""
    lease = outcome.lease
    claimed = claimed_of(lease)
    job = claimed.options
    attempts = job.attempts or options.max_attempts
    last = lease.attempt >= (lease.max_attempts or 1)
    start = f"{lease.token}\t{claimed.token_h}\t"
    end = f"\t{attempts}\t{lease.max_attempts}\t{'bury' if last else 'retry'}\t"
    if outcome.kind == "complete":
        keep = job.keep_completed or _default_keep(options.keep_completed, options.keep_completed_s)
        wait_ms = backoff_ms(job.backoff, _attempts_made(lease)) if job.backoff else 0
        result = outcome.result
        return (
            lease.job_id, lease.fence, "complete", result, short_hash(result), "", _packed(keep),
            f"{start}{wait_ms}{end}\t",
        )  # fmt: skip
    failure = outcome.failure
    kind, wait_ms = _decide(outcome, job, last)
    keep = job.keep_failed or _default_keep(options.keep_failed, options.keep_failed_s)
    reason = failure.message or failure.code if failure else ""
    unknown = _custom_backoff(lease) if outcome.kind == "fail" and not last else None
    if unknown:
        reason = (
            f"Unknown backoff strategy {unknown[0]}: a task of the worker says how long to wait, "
            f"by @task(..., backoff=function). The attempt failed with: {reason}"
        )
    stack = b""
    if failure and kind in ("retry", "bury"):
        stack = stack_of(claimed.stacktrace, _stack(failure, reason), job.stack_trace_limit)
    return (
        lease.job_id, lease.fence, kind, reason, "", stack, _packed(keep),
        f"{start}{wait_ms}{end}{'1' if job.lifo else ''}\t{error_code(failure)}",
    )  # fmt: skip


def _decide(outcome: Outcome, job: JobOptions, last: bool) -> tuple[str, int]:
    """The settle kind of a job that did not complete, and its delay.

    In BullMQ the worker decides this by the job's own options.
    """
    lease, kind = outcome.lease, outcome.kind
    if kind == "fail":
        if last or _custom_backoff(lease):
            return "bury", 0
        return "retry", outcome.delay_ms or backoff_ms(job.backoff, _attempts_made(lease))
    if kind == "retry" and lease.max_attempts and last:
        return "bury", 0
    if outcome.until == "children":
        return "park", backoff_ms(job.backoff, _attempts_made(lease))
    return "limit" if outcome.until == "rate_limit" else kind, outcome.delay_ms


def _job_options(lease: Lease) -> dict[str, Any]:
    return claimed_of(lease).opts


def _custom_backoff(lease: Lease) -> tuple[str, int] | None:
    """The type of a backoff that BullMQ leaves to the task (B-58), and the attempts made by now."""
    backoff = claimed_of(lease).options.backoff
    kind = backoff.get("type") if isinstance(backoff, dict) else None
    return None if kind in (None, "fixed", "exponential") else (str(kind), _attempts_made(lease))


def _attempts_made(lease: Lease) -> int:
    """Attempts made including this one; a start that stalled is not an attempt."""
    return lease.attempt - claimed_of(lease).stalled


def _stack(failure: Failure, reason: str) -> str:
    """An entry of `stacktrace`; it names the error, because Node's readers show nothing else."""
    if failure.code in failure.stack:
        return failure.stack
    return f"{failure.code}: {reason}" + (f"\n{failure.stack}" if failure.stack else "")


def _default_keep(count: int, age_s: int) -> Keep:
    """How many finished jobs to keep if a job's options do not say."""
    return Keep(count if count >= 0 else None, age_s or None) if count >= 0 or age_s else _KEEP_ALL


def _packed(keep: Keep) -> str:
    """Count, age and limit as the settle script takes them."""
    if keep == _KEEP_ALL:
        return "\t\t"
    return "\t".join("" if n is None else str(n) for n in (keep.count, keep.age_s, keep.limit))


def _verdict(lease: Lease, reply: Any) -> Verdict:
    if reply == 1:
        return COMPLETED
    kind, detail = reply
    return lost(lease, detail) if kind == b"lost" else verdict_of(kind.decode(), detail)


def _check_progress(progress: bytes) -> None:
    """Refuse a percentage that BullMQ's readers could not show (B-30)."""
    if progress and progress.lstrip(b"-").isdigit():
        percent = int(progress)
        if not 0 <= percent <= 100:
            raise UsageError(
                f"progress {percent}: a whole number is a percentage, 0 to 100; "
                "anything else goes as an object",
                contract=CONTRACT,
            )


def _report_args(report: Report) -> tuple[Arg, ...]:
    """The nine arguments of one report, in the order of report-16.lua."""
    lease, claimed = report.lease, claimed_of(report.lease)
    kind, data, keep = report.type, report.data, claimed.options.keep_logs or 0
    if report.payload:
        kind, data = "", report.payload
    elif kind == "log":  # the line is the `text` of the data, or all of the data
        decoded = msgspec.json.decode(data)
        text = decoded.get("text") if isinstance(decoded, dict) else decoded
        data = text.encode(errors="replace") if isinstance(text, str) else data
    return (
        lease.job_id, lease.fence, lease.token, kind, report.progress, report.step, data,
        claimed.token_h, keep if keep > 0 else "",
    )  # fmt: skip
