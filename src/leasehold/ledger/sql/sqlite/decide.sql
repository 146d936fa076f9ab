-- Decides about jobs that rest in `failed`: back to the line while attempts are left, else dead letter.
-- Takes: queue text, count integer
-- Returns: for each whether its job ended
-- Clauses: I-6
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id, mark)
SELECT job_id, attempt_count >= max_attempts FROM {jobs}
WHERE queue = :queue AND status = 'failed' LIMIT :count;
UPDATE {jobs} AS j
SET status = CASE WHEN c.mark THEN 'dead_letter' ELSE 'queued' END, passed = '',
  ready = NOT c.mark, due_ms = 0, ver = j.ver + 1, updated_ms = :now_ms
FROM temp.chosen c WHERE j.job_id = c.job_id;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, gid, priority, max_attempts)
SELECT :queue, j.job_id, j.ver, CASE WHEN c.mark THEN 'bury' ELSE 'retry' END, :now_ms, j.task,
  'failed', j.status, j.attempt_count, j.claim_version, j.claim_version, j.gid, j.priority,
  j.max_attempts
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id;
SELECT job_id, mark AS buried FROM temp.chosen;
