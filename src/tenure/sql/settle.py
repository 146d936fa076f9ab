"""Settle leases, decide about failed jobs, and answer repeated settles."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from tenure.core.encoding import short_hash
from tenure.core.errors import TRACEBACK_CHARS_MAX, LeaseLost, ServerError
from tenure.core.job import request_hash
from tenure.core.lease import Lease
from tenure.core.outcome import COMPLETED, Failure, Outcome, Verdict, verdict_of
from tenure.sql.engine import Engine, QueueSettings, Row
from tenure.sql.submit import AHEAD_MS_MAX
from tenure.store.resend import run_step

_BATCH_MAX = 1_000
_TRIES = 3
_MESSAGE_CHARS_MAX = 4_000
_SHORT_RESULT = 16  # most jobs return null or another short result, whose hash is cached
_FAILED = frozenset({"retry", "bury", "cancel"})

Delay = Callable[[Outcome], tuple[int, bool]]
"""After how many milliseconds a `fail` runs again, and whether it may at all."""
_Step = Callable[[list[Outcome]], Awaitable[list[tuple[int, Verdict]]]]


class Settler:
    """Settles the leases of one queue.

    `retry_delay_ms_min` returns the shortest delay of a `retry`. `on_requeued` is called when jobs
    went back to the queue.
    """

    def __init__(
        self,
        engine: Engine,
        settings: QueueSettings,
        delay: Delay,
        on_requeued: Callable[[], None],
        *,
        retry_delay_ms_min: Callable[[Outcome], int],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._delay = delay
        self._retry_delay_ms_min = retry_delay_ms_min
        self._on_requeued = on_requeued

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases; one lease twice in a batch ends once."""
        verdicts: dict[int, Verdict] = {}
        left = list(range(len(outcomes)))
        while left:
            first: dict[str, int] = {}
            for at in left:
                first.setdefault(outcomes[at].lease.job_id, at)
            # Sorted by job id, so that two batches do not deadlock.
            chosen = [first[job_id] for job_id in sorted(first)[:_BATCH_MAX]]
            settled = self._settle([outcomes[at] for at in chosen])
            answers = await run_step(settled, executed_before=len(left) < len(outcomes))
            verdicts.update(zip(chosen, answers, strict=True))
            left = [at for at in left if at not in verdicts]
        return [verdicts[at] for at in range(len(outcomes))]

    async def _settle(self, batch: list[Outcome]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        left = list(range(len(batch)))

        async def run(step: _Step, *, executed_before: bool) -> bool:
            """Run a step for the outcomes that are left; whether all of them have a verdict now."""
            nonlocal left
            answering = step([batch[at] for at in left])
            for n, verdict in await run_step(answering, executed_before=executed_before):
                verdicts[left[n]] = verdict
            left = [at for at in left if at not in verdicts]
            return not left

        # The statement leaves out rows that changed between reading and writing, so those are tried
        # again. What then is left was settled before, or its lease was lost.
        for attempt in range(_TRIES):
            if await run(self._write, executed_before=attempt > 0):
                break
            if await run(self._find_settled, executed_before=True):
                break
        leases = [batch[at].lease for at in left]
        lost = await refuse(self._engine, self._settings, "settle", leases)
        verdicts.update(zip(left, lost, strict=True))
        return [verdicts[at] for at in range(len(batch))]

    async def _write(self, batch: list[Outcome]) -> list[tuple[int, Verdict]]:
        settings = self._settings
        if all(outcome.kind == "complete" for outcome in batch):
            successes = [_success(outcome) for outcome in batch]
            (row,) = await self._engine.run(
                settings.table, "complete", successes, queue=settings.queue
            )
            if row["ended"] < len(batch):  # the rows of their attempts say which
                return []
            return [(at, COMPLETED) for at in range(len(batch))]
        batch_rows = [self._row(outcome) for outcome in batch]
        rows = await self._engine.run(settings.table, "settle", batch_rows, queue=settings.queue)
        await decide(
            self._engine, settings, [row["job_id"] for row in rows if row["verdict"] in _FAILED]
        )
        if any(row["verdict"] in ("retry", "snooze", "release") for row in rows):
            self._on_requeued()
        return [(row["n"] - 1, verdict_of(row["verdict"], row["due_ms"])) for row in rows]

    async def _find_settled(self, batch: list[Outcome]) -> list[tuple[int, Verdict]]:
        """The verdicts of outcomes that were accepted by an earlier call."""
        batch_rows = [(row[0], row[1], row[-1]) for row in map(self._row, batch)]
        settings = self._settings
        rows = await self._engine.run(settings.table, "settled", batch_rows, queue=settings.queue)
        # That call may have ended between the step to `failed` and the decision.
        failed = [batch[row["n"] - 1].lease.job_id for row in rows if row["verdict"] in _FAILED]
        await decide(self._engine, settings, failed)
        return [(row["n"] - 1, verdict_of(row["verdict"], row["due_ms"])) for row in rows]

    def _row(self, outcome: Outcome) -> tuple[Any, ...]:
        lease, kind, delay_ms, retryable = outcome.lease, outcome.kind, outcome.delay_ms, True
        if kind == "complete":
            job_id, fence, token_h, result, result_h = _success(outcome)
            return (
                *(job_id, fence, token_h, kind, 0, True, result, result_h),
                *("", "", "", f"{token_h}:c:{result_h}"),
            )
        token_h = token_hash(lease.token)
        if kind == "fail":
            delay_ms, retryable = self._delay(outcome)
        elif kind == "retry":
            delay_ms = max(delay_ms, self._retry_delay_ms_min(outcome))
        failure = outcome.failure
        request_h = request_hash(
            kind, outcome.delay_ms, failure and failure.code, failure and failure.message
        )
        return (
            *(lease.job_id, lease.fence, token_h, kind, min(delay_ms, AHEAD_MS_MAX), retryable),
            *("", "", *_errors(failure, kind), f"{token_h}:{kind}:{request_h}"),
        )


async def decide(engine: Engine, settings: QueueSettings, job_ids: Sequence[str]) -> int:
    """Move failed jobs back to the queue or to the dead letters; how many were given up.

    The step to `failed` and the decision are two transactions, so that a reader of the job can see
    both states. A worker that dies between them leaves the job in `failed`, where upkeep finds it.
    """
    if not job_ids:
        return 0
    batch = [(job_id,) for job_id in sorted(job_ids)]
    try:
        rows = await engine.run(settings.table, "decide", batch, queue=settings.queue)
        return sum(bool(row["buried"]) for row in rows)
    except ServerError:
        if len(batch) == 1:
            raise
    # The database refuses one of them: decide about all others, then raise its error.
    buried, refused = 0, None
    for job_id in job_ids:
        try:
            buried += await decide(engine, settings, [job_id])
        except ServerError as error:
            refused = error
    if refused is not None:
        raise refused
    return buried


async def refuse(
    engine: Engine, settings: QueueSettings, operation: str, leases: Sequence[Lease]
) -> list[LeaseLost]:
    """Record in the journal that leases were lost, and why."""
    if not leases:
        return []
    batch = [(lease.job_id, lease.fence, token_hash(lease.token), "") for lease in leases]
    recorded = engine.run(
        settings.table, "refuse", batch, queue=settings.queue, operation=operation
    )
    rows = await run_step(recorded, executed_before=True)  # the step that refused them
    why = {row["n"]: _reason(row) for row in rows}
    return [
        LeaseLost(lease.job_id, why.get(number, "the lease is no longer held"))
        for number, lease in enumerate(leases, 1)
    ]


@lru_cache(maxsize=1_024)
def token_hash(token: str) -> str:
    """The hash of a token, as stored. It is cached: the leases of one claim share their token."""
    return short_hash(token.encode())


def _success(outcome: Outcome) -> tuple[str, int, str, str, str]:
    lease, result = outcome.lease, outcome.result
    result_h = (_short_result_hash if len(result) <= _SHORT_RESULT else short_hash)(result)
    return lease.job_id, lease.fence, token_hash(lease.token), result.decode(), result_h


@lru_cache(maxsize=64)
def _short_result_hash(result: bytes) -> str:
    return short_hash(result)


def _reason(row: Row) -> str:
    if row["status"] is None:
        return "there is no such job (any more)"
    return f"the job is {row['status']} under claim version {row['claim_version']}"


def _errors(failure: Failure | None, kind: str) -> tuple[str, str, str]:
    """The error of the job, that of its attempt (with the stack), and the code for the journal."""
    if failure is None:
        if kind in ("snooze", "release"):
            return "", "", ""
        failure = Failure(code="cancelled" if kind == "cancel" else kind, message="")
    failure = Failure(
        code="".join(failure.code.split()).replace("\0", "")[:80],
        message=failure.message.replace("\0", "")[:_MESSAGE_CHARS_MAX],
        stack=failure.stack.replace("\0", "")[-TRACEBACK_CHARS_MAX:],
        retryable=failure.retryable,
    )
    whole = msgspec.json.encode(failure).decode()
    shown = msgspec.json.encode(
        {"code": failure.code, "message": failure.message, "retryable": failure.retryable}
    )
    return shown.decode(), whole, failure.code
