-- One job as it is stored.
-- Takes: job_id text
-- Returns: its row, or nothing
-- Clauses: I-30
SELECT job_id, queue, task, status, payload, result, error, attempt_count, max_attempts,
  claim_version, created_ms, updated_ms, due_ms, lease_expires_at, expires_ms, priority, gid,
  worker_id, requester_id, progress, trace, cancel_requested, lost_count, credential_refresh_count,
  event_count, credential_version, status_webhook_url, seq
FROM {jobs} WHERE job_id = :job_id;
