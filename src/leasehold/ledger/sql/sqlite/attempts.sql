-- The attempts at a job that have ended, oldest first.
-- Takes: job_id text
-- Returns: their rows
-- Clauses: I-30
SELECT claim_version, attempt, worker_id, claimed_ms, ended_ms, verdict, error_code, error, due_ms
FROM job_attempts WHERE job_id = :job_id ORDER BY claim_version;
