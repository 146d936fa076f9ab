"""What becomes of jobs that failed: `failed` leads back to the line or to the dead letters.

The step to `failed` and the decision are two transactions, so that a reader of the job can see
both states. A worker that dies between them leaves the job in `failed`, where upkeep finds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tenure.core.errors import ServerError
from tenure.ledger.engine import Engine
from tenure.ledger.settings import BoxSettings


async def decide(engine: Engine, settings: BoxSettings, job_ids: Sequence[str]) -> int:
    """Lead these jobs on, as far as they rest in `failed`; how many were given up."""
    if not job_ids:
        return 0
    batch = [(job_id,) for job_id in sorted(job_ids)]
    try:
        rows = await engine.run(settings.table, "decide", batch, queue=settings.queue)
    except ServerError:
        if len(batch) == 1:
            raise
        return await _one_by_one(engine, settings, job_ids)
    return sum(bool(row["buried"]) for row in rows)


async def _one_by_one(engine: Engine, settings: BoxSettings, job_ids: Sequence[str]) -> int:
    """Lead on every job but those that the database refuses; then raise what it said of one."""
    buried, refused = 0, None
    for job_id in job_ids:
        try:
            buried += await decide(engine, settings, [job_id])
        except ServerError as error:
            refused = error
    if refused is not None:
        raise refused
    return buried
