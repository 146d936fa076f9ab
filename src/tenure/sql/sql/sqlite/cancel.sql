-- Fails waiting jobs, by the only walk that the table has for them, and marks running ones for their
-- holders; `decide` ends what failed.
-- Batch: job_id text
-- Takes: queue text
-- Returns: for each known job its number and the state that was found
-- Clauses: I-6 I-26
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id, n, was)
SELECT j.job_id, a.n, j.status FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.queue = :queue;
UPDATE {jobs} SET cancel_requested = 1
WHERE job_id IN (SELECT job_id FROM temp.chosen WHERE was IN {running});
UPDATE {jobs} AS j
SET status = 'failed', ready = 0, due_ms = -2, ver = j.ver + (c.was = 'queued'), updated_ms = :now_ms,
  passed = CASE WHEN c.was = 'queued' THEN 'claimed>' ELSE '' END,
  error = '{"code":"cancelled","message":"cancelled on request","retryable":false}'
FROM temp.chosen c
WHERE j.job_id = c.job_id AND c.was IN ('queued', 'failed');
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, gid, priority, max_attempts, error_code)
SELECT :queue, j.job_id, j.ver, 'fail', :now_ms, j.task, 'queued', 'failed', j.attempt_count,
  j.claim_version, j.claim_version, j.gid, j.priority, j.max_attempts, 'cancelled'
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id WHERE c.was = 'queued';
SELECT n, was FROM temp.chosen;
