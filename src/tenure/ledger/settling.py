"""Ending leases, and answering a settle that is sent again with the verdict it had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from tenure.core.errors import LeaseLost
from tenure.core.job import request_hash, short_hash
from tenure.core.lease import Lease
from tenure.core.outcome import (
    BURIED,
    CANCELLED,
    COMPLETED,
    RELEASED,
    Failure,
    Outcome,
    Retried,
    Verdict,
)
from tenure.ledger.deciding import decide
from tenure.ledger.engine import Engine, Row
from tenure.ledger.settings import BoxSettings
from tenure.ledger.submitting import AHEAD_MS_MAX
from tenure.store.resending import part

_BATCH_MAX = 1_000
_TRIES = 3
_MESSAGE_CHARS_MAX = 4_000
_SHORT_RESULT = 16  # most jobs return nothing, or the same few words
_VERDICTS: dict[str, Verdict] = {
    "complete": COMPLETED,
    "bury": BURIED,
    "release": RELEASED,
    "cancel": CANCELLED,
}

_FAILED = frozenset({"retry", "bury", "cancel"})

Delay = Callable[[Outcome], tuple[int, bool]]
"""After how many milliseconds a `fail` runs again, and whether it may at all."""


class Settling:
    """Settles of one box."""

    def __init__(
        self,
        engine: Engine,
        settings: BoxSettings,
        delay: Delay,
        sent_back: Callable[[], None],
        *,
        least_ms: Callable[[Outcome], int],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._delay = delay
        self._least_ms = least_ms
        self._sent_back = sent_back

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases; one lease twice in a batch ends once."""
        verdicts: list[Verdict | None] = [None] * len(outcomes)
        left = list(range(len(outcomes)))
        while left:
            first: dict[str, int] = {}
            for position in left:
                first.setdefault(outcomes[position].lease.job_id, position)
            chosen = sorted(first.values(), key=lambda at: outcomes[at].lease.job_id)[:_BATCH_MAX]
            await part(len(left) < len(outcomes), self._settle(outcomes, chosen, verdicts))
            left = [position for position in left if verdicts[position] is None]
        return [verdict for verdict in verdicts if verdict is not None]

    async def _settle(
        self, outcomes: Sequence[Outcome], chosen: list[int], verdicts: list[Verdict | None]
    ) -> None:
        batch = [outcomes[position] for position in chosen]
        left = list(range(len(chosen)))
        # A row that changed between reading and writing is left out, not lost: it is asked for
        # again, until what is left is answered from the past or really belongs to somebody else.
        for turn in range(_TRIES):
            for at, verdict in await part(turn, self._ended([batch[at] for at in left])):
                verdicts[chosen[left[at]]] = verdict
            left = [at for at in left if verdicts[chosen[at]] is None]
            if not left:
                return
            for at, verdict in await part(1, self._again([batch[at] for at in left])):
                verdicts[chosen[left[at]]] = verdict
            left = [at for at in left if verdicts[chosen[at]] is None]
            if not left:
                return
        leases = [outcomes[chosen[at]].lease for at in left]
        answers = await refuse(self._engine, self._settings, "settle", leases)
        for at, answer in zip(left, answers, strict=True):
            verdicts[chosen[at]] = answer

    async def _ended(self, batch: list[Outcome]) -> list[tuple[int, Verdict]]:
        settings = self._settings
        if all(outcome.kind == "complete" for outcome in batch):
            return await self._succeeded(batch)
        asked = [self._row(outcome) for outcome in batch]
        rows = await self._engine.run(settings.table, "settle", asked, queue=settings.queue)
        failed = [row["job_id"] for row in rows if row["verdict"] in _FAILED]
        await decide(self._engine, settings, failed)
        if any(row["verdict"] in ("retry", "snooze", "release") for row in rows):
            self._sent_back()
        return [(row["n"] - 1, _verdict(row)) for row in rows]

    async def _succeeded(self, batch: list[Outcome]) -> list[tuple[int, Verdict]]:
        settings = self._settings
        asked = [_success(outcome) for outcome in batch]
        rows = await self._engine.run(settings.table, "complete", asked, queue=settings.queue)
        if rows[0]["ended"] < len(batch):  # which, their attempts tell
            return await self._again(batch)
        return [(at, COMPLETED) for at in range(len(batch))]

    async def _again(self, batch: list[Outcome]) -> list[tuple[int, Verdict]]:
        given = map(self._row, batch)
        asked = [(row[0], row[1], row[-1]) for row in given]
        settings = self._settings
        rows = await self._engine.run(settings.table, "settled", asked, queue=settings.queue)
        # The one whose answer was lost may have failed its job and not decided about it.
        failed = [batch[row["n"] - 1].lease.job_id for row in rows if row["verdict"] in _FAILED]
        await decide(self._engine, settings, failed)
        return [(row["n"] - 1, _verdict(row)) for row in rows]

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
            delay_ms = max(delay_ms, self._least_ms(outcome))
        failure = outcome.failure
        asked = request_hash(
            kind, outcome.delay_ms, failure and failure.code, failure and failure.message
        )
        return (
            *(lease.job_id, lease.fence, token_h, kind, min(delay_ms, AHEAD_MS_MAX), retryable),
            *("", ""),
            *_errors(failure, kind),
            f"{token_h}:{kind}:{asked}",
        )


def _success(outcome: Outcome) -> tuple[str, int, str, str, str]:
    lease, result = outcome.lease, outcome.result
    result_h = (_short_result_hash if len(result) <= _SHORT_RESULT else short_hash)(result)
    return lease.job_id, lease.fence, token_hash(lease.token), result.decode(), result_h


@lru_cache(maxsize=1_024)
def token_hash(token: str) -> str:
    """What the database keeps of a token. The leases of one claim share theirs."""
    return short_hash(token.encode())


@lru_cache(maxsize=64)
def _short_result_hash(result: bytes) -> str:
    return short_hash(result)


async def refuse(
    engine: Engine, settings: BoxSettings, operation: str, leases: Sequence[Lease]
) -> list[LeaseLost]:
    """Tell holders that they lost their leases, and note it."""
    if not leases:
        return []
    batch = [(lease.job_id, lease.fence, token_hash(lease.token), "") for lease in leases]
    asked = engine.run(settings.table, "refuse", batch, queue=settings.queue, operation=operation)
    rows = await part(1, asked)  # after the step that refused them
    why = {row["n"]: _reason(row) for row in rows}
    return [
        LeaseLost(lease.job_id, why.get(number, "the lease is no longer held"))
        for number, lease in enumerate(leases, 1)
    ]


def _reason(row: Row) -> str:
    if row["status"] is None:
        return "there is no such job (any more)"
    return f"the job is {row['status']} under claim version {row['claim_version']}"


def _verdict(row: Row) -> Verdict:
    verdict = row["verdict"]
    return Retried(row["due_ms"]) if verdict in ("retry", "snooze") else _VERDICTS[verdict]


def _errors(failure: Failure | None, kind: str) -> tuple[str, str, str]:
    """What the job shows, what its attempt keeps with the stack, and the code for the journal."""
    if failure is None:
        failure = Failure(code="cancelled" if kind == "cancel" else kind, message="")
        if kind in ("snooze", "release"):
            return "", "", ""
    failure = Failure(
        code="".join(failure.code.split()).replace("\0", "")[:80],
        message=failure.message.replace("\0", "")[:_MESSAGE_CHARS_MAX],
        stack=failure.stack.replace("\0", ""),
        retryable=failure.retryable,
    )
    whole = msgspec.json.encode(failure).decode()
    shown = msgspec.json.encode(
        {"code": failure.code, "message": failure.message, "retryable": failure.retryable}
    )
    return shown.decode(), whole, failure.code
