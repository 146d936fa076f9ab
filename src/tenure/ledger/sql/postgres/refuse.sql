-- Notes that stale holders were told so; nothing changes.
-- Batch: job_id text, fence bigint, token_h text, worker_id text
-- Takes: queue text, operation text
-- Returns: for each refusal its number and what the job is now (nothing for a job that this queue does not have)
-- Clauses: I-11
WITH seen AS MATERIALIZED (
  SELECT a.n, a.job_id, a.fence AS shown, a.token_h, a.worker_id, j.status, j.claim_version, j.task,
    j.attempt_count
  FROM (SELECT * FROM {batch}) a LEFT JOIN {jobs} j ON j.job_id = a.job_id AND j.queue = :queue
),
noted AS (
  INSERT INTO job_journal (queue, job_id, type, ts_ms, task, from_state, to_state, attempt, fence,
    prev_fence, token_h, worker_id, error_code, data)
  SELECT :queue, job_id, 'reject', {now}, coalesce(task, ''), coalesce(status, ''),
    coalesce(status, ''), coalesce(attempt_count, 0), shown, coalesce(claim_version, 0), token_h,
    worker_id, 'lease_lost', :operation
  FROM seen WHERE status IS NOT NULL -- made-up ids leave nothing
)
SELECT n, status, claim_version FROM seen
