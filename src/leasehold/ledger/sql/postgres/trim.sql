-- Forgets what only time kept: expired idempotency keys of ended jobs, old tombstones, tickets, workers
-- that went, and the oldest journal rows.
-- Takes: queue text, journal_ms bigint, tombstone_ms bigint, count integer
-- Returns: how many journal rows
-- Clauses: I-3 I-24
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
keys AS (
  DELETE FROM idempotency_keys k USING clock c
  WHERE k.queue = :queue AND k.expires_ms <= c.now_ms
    AND NOT EXISTS (SELECT FROM {jobs} j WHERE j.job_id = k.job_id
      AND j.status NOT IN ('succeeded', 'dead_letter'))
),
tombs AS (DELETE FROM pruned_jobs p USING clock c WHERE p.pruned_ms < c.now_ms - :tombstone_ms),
tickets AS (DELETE FROM api_tickets t USING clock c WHERE t.expires_ms < c.now_ms),
workers AS (DELETE FROM job_workers w USING clock c
  WHERE w.queue = :queue AND w.seen_ms < c.now_ms - 3600000),
old AS MATERIALIZED (
  SELECT seq FROM job_journal
  WHERE queue = :queue AND ts_ms < (SELECT now_ms FROM clock) - :journal_ms
    AND seq < (SELECT min(seq) + :count FROM job_journal WHERE queue = :queue)
),
trimmed AS (
  DELETE FROM job_journal n USING old o WHERE n.queue = :queue AND n.seq = o.seq RETURNING 1
)
SELECT count(*) AS trimmed FROM trimmed
