-- Fails jobs that were not started within their time to live; `decide` ends them.
-- Takes: queue text, count integer
-- Returns: how many
-- Clauses: I-21
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id, mark)
SELECT job_id, attempt_count = 0 FROM {jobs}
WHERE queue = :queue AND expires_ms > 0 AND expires_ms <= :now_ms AND status = 'queued'
ORDER BY expires_ms LIMIT :count;
UPDATE {jobs} SET expires_ms = 0
WHERE job_id IN (SELECT job_id FROM temp.chosen WHERE NOT mark);
UPDATE {jobs}
SET status = 'failed', passed = 'claimed>', ready = 0, due_ms = -3, ver = ver + 1,
  updated_ms = :now_ms,
  error = '{"code":"expired","message":"not started within its time to live","retryable":false}'
WHERE job_id IN (SELECT job_id FROM temp.chosen WHERE mark);
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, gid, priority, max_attempts, error_code)
SELECT :queue, j.job_id, j.ver, 'fail', :now_ms, j.task, 'queued', 'failed', j.attempt_count,
  j.claim_version, j.claim_version, j.gid, j.priority, j.max_attempts, 'expired'
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id WHERE c.mark;
SELECT count(*) AS expired FROM temp.chosen WHERE mark;
