-- Deletes jobs that nobody runs, with all that belongs to them.
-- Batch: job_id text
-- Takes: queue text
-- Returns: for each known job its number and the state that was found
-- Clauses: I-28
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id, n, was)
SELECT j.job_id, a.n, j.status FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.queue = :queue;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, attempt, fence,
  prev_fence)
SELECT :queue, j.job_id, j.ver + 1, 'remove', :now_ms, j.task, j.status, j.attempt_count,
  j.claim_version, j.claim_version
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id WHERE c.was NOT IN {running};
DELETE FROM job_attempts
WHERE queue = :queue AND job_id IN (SELECT job_id FROM temp.chosen WHERE was NOT IN {running});
DELETE FROM idempotency_keys
WHERE queue = :queue AND job_id IN (SELECT job_id FROM temp.chosen WHERE was NOT IN {running});
DELETE FROM {jobs} WHERE job_id IN (SELECT job_id FROM temp.chosen WHERE was NOT IN {running});
SELECT n, was FROM temp.chosen;
