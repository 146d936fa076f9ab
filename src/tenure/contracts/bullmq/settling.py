"""Ending leases."""

from __future__ import annotations

from collections.abc import Sequence

from tenure.contracts.bullmq.options import Options
from tenure.contracts.bullmq.outcomes import _kept_by, _packed, settle_args, verdict_of
from tenure.contracts.bullmq.scripts import BATCH_MAX, Scripts
from tenure.core.outcome import Outcome, Verdict
from tenure.store.redis import Arg
from tenure.store.resending import part


async def settle(
    scripts: Scripts,
    options: Options,
    outcomes: Sequence[Outcome],
    *,
    worker_id: str,
    token: tuple[str, str],
) -> list[Verdict]:
    """A verdict for each outcome, in their order; `token` is the worker's own, and its hash."""
    # The last is for jobs that were to complete and fail, because their children forbid it.
    kept_failed = _packed(_kept_by(options.keep_failed, options.keep_failed_s))
    head = (worker_id, *token, options.metrics_minutes, options.limit_max or "", kept_failed)
    verdicts: list[Verdict] = []
    for start in range(0, len(outcomes), BATCH_MAX):
        chunk = outcomes[start : start + BATCH_MAX]
        args: list[Arg] = []
        for outcome in chunk:
            args += settle_args(outcome, options)
        replies = await part(start, scripts.run("settle", *head, *args))
        verdicts += [
            verdict_of(outcome.lease, reply) for outcome, reply in zip(chunk, replies, strict=True)
        ]
    return verdicts
