-- Forgets what only time kept: expired idempotency keys of ended jobs, old tombstones, tickets, workers
-- that went.
-- Takes: queue text, tombstone_ms bigint
-- Returns: nothing
-- Clauses: I-3 I-24
DELETE FROM idempotency_keys
WHERE queue = :queue AND expires_ms <= :now_ms AND NOT EXISTS (SELECT 1 FROM {jobs} j
  WHERE j.job_id = idempotency_keys.job_id AND j.status NOT IN ('succeeded', 'dead_letter'));
DELETE FROM pruned_jobs WHERE pruned_ms < :now_ms - :tombstone_ms;
DELETE FROM api_tickets WHERE expires_ms < :now_ms;
DELETE FROM job_workers WHERE queue = :queue AND seen_ms < :now_ms - 3600000;
