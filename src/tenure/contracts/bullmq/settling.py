"""Ending leases. Plain completions, which are most, take a short script of their own; whatever
turns out not to be plain goes through the whole one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tenure.contracts.bullmq.claimed import Claimed, token_h_of
from tenure.contracts.bullmq.options import Options
from tenure.contracts.bullmq.outcomes import keep_args, kept_by, settle_args, verdict_of
from tenure.contracts.bullmq.scripts import BATCH_MAX, Scripts
from tenure.core.job import short_hash
from tenure.core.outcome import COMPLETED, Outcome, Verdict
from tenure.store.redis import Arg
from tenure.store.resending import part


class Settles:
    """The settles of one worker on one queue, under one token."""

    def __init__(
        self, scripts: Scripts, options: Options, *, worker_id: str, token: tuple[str, str]
    ) -> None:
        self._scripts = scripts
        self._options = options
        self._worker_id = worker_id
        self._token, self._token_h = token

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """A verdict for each outcome, in their order."""
        verdicts: list[Verdict | None] = [None] * len(outcomes)
        plain: list[int] = []
        rest: list[int] = []
        for position, outcome in enumerate(outcomes):
            (plain if self._is_plain(outcome) else rest).append(position)
        for start in range(0, len(plain), BATCH_MAX):
            chunk = plain[start : start + BATCH_MAX]
            rest += await part(start, self._complete(outcomes, chunk, verdicts))
        for start in range(0, len(rest), BATCH_MAX):
            chunk = rest[start : start + BATCH_MAX]
            await part(start or plain, self._settle(outcomes, chunk, verdicts))
        return verdicts  # type: ignore[return-value]

    def _is_plain(self, outcome: Outcome) -> bool:
        if outcome.kind != "complete" or outcome.lease.token != self._token:
            return False
        claimed = outcome.lease.extra
        options = self._options
        return (
            isinstance(claimed, Claimed)
            and not claimed.attempts_made
            and not claimed.options.keeps
            and options.keep_completed < 0
            and not options.keep_completed_s
            and not options.metrics_minutes
        )

    async def _complete(
        self, outcomes: Sequence[Outcome], chunk: list[int], verdicts: list[Verdict | None]
    ) -> list[int]:
        """Settle plain completions; returns the positions of those that are not plain after all."""
        args: list[Arg] = []
        for position in chunk:
            outcome = outcomes[position]
            lease, result = outcome.lease, outcome.result
            args += (lease.job_id, lease.fence, result, short_hash(result), lease.task)
            args.append(lease.priority)
        head = (self._worker_id, self._token, self._token_h, self._options.limit_max or "")
        replies = await self._scripts.run("complete", *head, *args)
        others = []
        for position, is_done in zip(chunk, replies, strict=True):
            if is_done:
                verdicts[position] = COMPLETED
            else:
                others.append(position)
        return others

    async def _settle(
        self, outcomes: Sequence[Outcome], chunk: list[int], verdicts: list[Verdict | None]
    ) -> None:
        options = self._options
        args: list[Arg] = []
        for position in chunk:
            outcome = outcomes[position]
            args += settle_args(outcome, options, token_h_of(outcome.lease))
        # For jobs that were to complete and fail, because their children forbid it.
        failed = keep_args(kept_by(options.keep_failed, options.keep_failed_s))
        head = (self._worker_id, options.metrics_minutes, options.limit_max or "", *failed)
        replies = await self._scripts.run("settle", *head, *args)
        for position, reply in zip(chunk, replies, strict=True):
            verdicts[position] = verdict_of(outcomes[position].lease, reply)
