"""Made histories in PostgreSQL: the journal of an inbox after so many jobs of four events each."""

from __future__ import annotations

import asyncio

from tenure.sql.schema import PostgresMigrations, migrate
from tenure.store.postgres import Postgres

BEGAN_MS = 1_794_700_000_000
# One row in four is a submit, a claim, an extend, a complete; jobs overlap as they do in life.
_FILL = """
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, fence, prev_fence, lease_until_ms,
  prev_lease_until_ms, attempt, max_attempts, task, from_state, to_state, worker_id)
SELECT 'inbox', md5((n / 80 * 20 + n % 20)::text), 1 + step,
  (ARRAY['submit', 'claim', 'extend', 'complete'])[1 + step], at,
  (step > 0)::int, (step > 1)::int,
  CASE step WHEN 1 THEN at + 15000 WHEN 2 THEN at + 20000 ELSE 0 END,
  CASE step WHEN 2 THEN at + 15000 WHEN 3 THEN at + 20000 ELSE 0 END,
  (step > 0)::int, 5, 'task' || n / 80 % 7,
  (ARRAY['', 'queued', 'claimed', 'claimed'])[1 + step],
  (ARRAY['queued', 'claimed', 'claimed', 'succeeded'])[1 + step],
  CASE WHEN step > 0 THEN 'worker-' || n / 80 % 9 ELSE '' END
FROM (
  SELECT n, n / 20 % 4 AS step, {began} + n / 50 AS at FROM generate_series(0, {events} - 1) AS n
) AS made
"""


def made_ledger(url: str) -> str:
    """The ledger's tables in an empty database; the queue URL of its inbox."""
    asyncio.run(_made(url))
    return f"inbox+{url}"


def fill_table(url: str, events: int) -> int:
    """Put such a history into the journal; how many events it has."""
    asyncio.run(_filled(url, _FILL.format(began=BEGAN_MS, events=events)))
    return events


async def _made(url: str) -> None:
    database = Postgres(url, schema="tenure")
    await migrate(PostgresMigrations(database), "postgres")
    await database.close()


async def _filled(url: str, statement: str) -> None:
    database = Postgres(url, schema="tenure")
    try:
        await database.script(f"{statement}; ANALYZE job_journal")
    finally:
        await database.close()
