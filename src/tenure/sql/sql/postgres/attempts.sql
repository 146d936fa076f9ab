-- The attempts at a job, oldest first: those of the plane from their claims on, others when they ended.
-- Takes: job_id text
-- Returns: their rows
-- Clauses: I-30
SELECT t.claim_version, t.attempt, t.worker_id, t.claimed_ms, t.ended_ms, t.verdict, t.error_code,
  t.error, t.due_ms
FROM {jobs} j JOIN job_attempts t ON t.job_id = j.job_id AND t.queue = j.queue
WHERE j.job_id = :job_id ORDER BY t.claim_version
