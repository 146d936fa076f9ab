"""The `bullmq` contract on the seam: the data real BullMQ keeps in Redis, by scripts of our own.

A job is a hash, its turn an id in `wait`, `prioritized` or `delayed`, its lease the key
`<id>:lock`. Node workers and producers may share the queue at any time: everything they read is
written as they write it. What they do not know (the journal, one field of the job) is beside it.
The head of every file in `lua/` says what it does and which clauses it serves.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from tenure.contracts.bullmq.claim import Claims, claimed_of
from tenure.contracts.bullmq.options import (
    CONTRACT,
    JobOptions,
    Keep,
    Options,
    backoff_ms,
    stack_of,
)
from tenure.contracts.bullmq.producer import submit_answer, submit_args
from tenure.contracts.bullmq.records import Children, read_children
from tenure.contracts.bullmq.scripts import BATCH_MAX, Scripts
from tenure.core.errors import LeaseLost, UsageError
from tenure.core.job import NewJob, Submitted, short_hash
from tenure.core.lease import Lease, Report
from tenure.core.outcome import COMPLETED, Failure, Outcome, Verdict, verdict_of
from tenure.core.seam import Quarantined, QueueFeatures, Upkeep
from tenure.store.redis import Arg, Redis

_KEEP_ALL = Keep()
_WORKER_ID_UNSAFE = re.compile(r"[^A-Za-z0-9_.:@-]")
# BullMQ's own events, which tell a job's state: a handler cannot report one of these.
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
        self.worker_id = _WORKER_ID_UNSAFE.sub("-", worker_id) or f"anon-{secrets.token_hex(6)}"
        self.slots = 0
        secret = secrets.token_urlsafe(16)
        self._token = (secret, short_hash(secret.encode()))
        self._claims = Claims(
            redis, self._scripts, options, worker_id=self.worker_id, token=self._token, url=url
        )

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; an id or idempotency key seen before answers with the job there is."""
        options = self._options
        rows: list[tuple[Arg, ...]] = []
        invalid: dict[int, Submitted] = {}
        for position, job in enumerate(jobs):
            try:
                rows.append(submit_args(job))
            except UsageError as error:
                invalid[position] = Submitted("", "invalid", str(error))
        head = ("", options.max_depth, options.idempotency_ttl_s * 1000)
        replies = iter(await self._scripts.run_rows("add", head, rows))
        return [
            invalid.get(position) or submit_answer(next(replies), options)
            for position in range(len(jobs))
        ]

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases; waits where BullMQ's workers do, and is woken as they are."""
        return await self._claims.claim(limit, wait_ms, self.settle) if limit > 0 else []

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Renew locks; the script writes only when a third of the lease is spent."""
        rows = [
            (lease.job_id, lease.fence, lease.token, lease.attempt, claimed_of(lease).token_h)
            for lease in leases
        ]
        head = (self.worker_id, self._options.lease_ms)
        replies = await self._scripts.run_rows("extend", head, rows)
        return [_extended(*pair) for pair in zip(leases, replies, strict=True)]

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Write progress and lines of the log, and publish events to the queue's followers."""
        for report in reports:
            _check_report(report)
        rows = [_report_args(report) for report in reports]
        replies = await self._scripts.run_rows("report", (self.worker_id,), rows)
        return [
            None if reply[0] == b"ok" else LeaseLost(report.lease.job_id, reply[1].decode())
            for report, reply in zip(reports, replies, strict=True)
        ]

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases: one step for a batch, a verdict for each outcome."""
        options = self._options
        # The last is for jobs that were to complete and fail because their children forbid it.
        kept_failed = _packed(_kept_by(options.keep_failed, options.keep_failed_s))
        limit_max = options.limit_max or ""
        head = (self.worker_id, *self._token, options.metrics_minutes, limit_max, kept_failed)
        rows = [_settle_args(outcome, options) for outcome in outcomes]
        replies = await self._scripts.run_rows("settle", head, rows)
        for outcome in outcomes:
            self._claims.forget(outcome.lease.job_id)
        return [
            _verdict(outcome.lease, reply) for outcome, reply in zip(outcomes, replies, strict=True)
        ]

    async def children(self, job_id: str) -> Children:
        """The children of a job: what each of them left, and which are still to come."""
        return await read_children(self._redis, self._options.key_prefix + job_id)

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
            await self._scripts.restore()
        return Upkeep(*reply[:5])

    @property
    def features(self) -> QueueFeatures:
        """What it has beyond the seam."""
        return QueueFeatures(
            claim_max=BATCH_MAX,
            replaces_payload=True,
            take_quarantined=self.take_quarantined,
            children=self.children,
            custom_backoff=_custom_backoff,
            job_options=_job_options,
        )

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
        keep = job.keep_completed or _kept_by(options.keep_completed, options.keep_completed_s)
        wait_ms = backoff_ms(job.backoff, _made(lease)) if job.backoff else 0
        result = outcome.result
        return (
            lease.job_id, lease.fence, "complete", result, short_hash(result), "", _packed(keep),
            f"{start}{wait_ms}{end}\t",
        )  # fmt: skip
    failure = outcome.failure
    kind, wait_ms = _decide(outcome, job, last)
    keep = job.keep_failed or _kept_by(options.keep_failed, options.keep_failed_s)
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
        f"{start}{wait_ms}{end}{'1' if job.lifo else ''}\t{_error_code(failure)}",
    )  # fmt: skip


def _decide(outcome: Outcome, job: JobOptions, last: bool) -> tuple[str, int]:
    """What becomes of a job that did not complete, and after which delay. BullMQ lets the worker
    decide it, by the job's own options."""
    lease, kind = outcome.lease, outcome.kind
    if kind == "fail":
        if last or _custom_backoff(lease):
            return "bury", 0
        return "retry", outcome.delay_ms or backoff_ms(job.backoff, _made(lease))
    if kind == "retry" and lease.max_attempts and last:
        return "bury", 0
    if outcome.until == "children":
        return "park", backoff_ms(job.backoff, _made(lease))
    return "limit" if outcome.until == "rest" else kind, outcome.delay_ms


def _job_options(lease: Lease) -> dict[str, Any]:
    return claimed_of(lease).opts


def _custom_backoff(lease: Lease) -> tuple[str, int] | None:
    """The type of a backoff that BullMQ leaves to the worker, and the attempts made by now."""
    backoff = claimed_of(lease).options.backoff
    kind = backoff.get("type") if isinstance(backoff, dict) else None
    return None if kind in (None, "fixed", "exponential") else (str(kind), _made(lease))


def _made(lease: Lease) -> int:
    """Attempts made when this one has failed; starts that stalled are none."""
    return lease.attempt - claimed_of(lease).stalled


def _stack(failure: Failure, reason: str) -> str:
    """An entry as Node's readers show it: it names the error, wherever the stack came from."""
    if failure.code in failure.stack:
        return failure.stack
    return f"{failure.code}: {reason}" + (f"\n{failure.stack}" if failure.stack else "")


def _error_code(failure: Failure | None) -> str:
    """The error code as the journal takes it: one short word without separators."""
    return "" if failure is None else "".join(failure.code.split())[:80]


def _kept_by(count: int, age_s: int) -> Keep:
    """What a worker keeps of jobs that say nothing themselves."""
    return Keep(count if count >= 0 else None, age_s or None) if count >= 0 or age_s else _KEEP_ALL


def _packed(keep: Keep) -> str:
    """Count, age and limit as the settle script takes them."""
    if keep == _KEEP_ALL:
        return "\t\t"
    return "\t".join("" if n is None else str(n) for n in (keep.count, keep.age_s, keep.limit))


def _verdict(lease: Lease, reply: Any) -> Verdict:
    if reply == 1:
        return COMPLETED
    code = reply[0]
    if code == b"lost":
        return LeaseLost(lease.job_id, reply[1].decode())
    return verdict_of(code.decode(), reply[1] if code == b"retry" else 0)


def _check_report(report: Report) -> None:
    """Refuse reports that BullMQ's readers would take for something else (B-30)."""
    if report.type in _RESERVED_EVENTS:
        raise UsageError(
            f"a handler cannot report {report.type!r}: that is an event of BullMQ's own; "
            "return, raise, or use another name",
            contract=CONTRACT,
        )
    if report.progress and report.progress.lstrip(b"-").isdigit():
        percent = int(report.progress)
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
    elif kind == "log":  # the line is its `text`, or all of it where it has none
        decoded = msgspec.json.decode(data)
        text = decoded.get("text") if isinstance(decoded, dict) else decoded
        data = text.encode(errors="replace") if isinstance(text, str) else data
    return (
        lease.job_id, lease.fence, lease.token, kind, report.progress, report.step, data,
        claimed.token_h, keep if keep > 0 else "",
    )  # fmt: skip
