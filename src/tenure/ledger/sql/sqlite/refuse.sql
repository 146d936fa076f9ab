-- Notes that stale holders were told so; nothing changes.
-- Batch: job_id text, fence bigint, token_h text, worker_id text
-- Takes: queue text, operation text
-- Returns: for each refusal its number and what the job is now (nothing for a job that this queue does not have)
-- Clauses: I-11
INSERT INTO job_journal (queue, job_id, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, error_code, data)
SELECT :queue, a.job_id, 'reject', :now_ms, coalesce(j.task, ''), coalesce(j.status, ''),
  coalesce(j.status, ''), coalesce(j.attempt_count, 0), a.fence, coalesce(j.claim_version, 0),
  a.token_h, a.worker_id, 'lease_lost', :operation
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id AND j.queue = :queue; -- made-up ids leave nothing
SELECT a.n, j.status, j.claim_version FROM {batch} a
  LEFT JOIN {jobs} j ON j.job_id = a.job_id AND j.queue = :queue;
