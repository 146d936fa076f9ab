-- Forgets what only time kept: expired idempotency keys of ended jobs, old tombstones, tickets, workers
-- that went.
-- Takes: queue text, tombstone_ms bigint
-- Returns: nothing
-- Clauses: I-3 I-24
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
keys AS (
  DELETE FROM idempotency_keys k USING clock c
  WHERE k.queue || '' = :queue AND k.expires_ms <= c.now_ms
    AND (SELECT j.seq FROM {jobs} j WHERE j.job_id = k.job_id COLLATE "C"
      AND j.status NOT IN ('succeeded', 'dead_letter') LIMIT 1) IS NULL
),
tombs AS (DELETE FROM pruned_jobs p USING clock c WHERE p.pruned_ms < c.now_ms - :tombstone_ms),
tickets AS (DELETE FROM api_tickets t USING clock c WHERE t.expires_ms < c.now_ms),
workers AS (DELETE FROM job_workers w USING clock c
  WHERE w.queue = :queue AND w.seen_ms < c.now_ms - 3600000)
SELECT 1 FROM clock
