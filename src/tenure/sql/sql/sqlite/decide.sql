-- Moves jobs out of `failed`: back to the line while attempts are left and they were not given up,
-- else to their end. `due_ms` says when, or why not: -1 given up, -2 cancelled, -3 expired.
-- Batch: job_id text
-- Takes: queue text
-- Returns: for each whether it was given up
-- Clauses: I-6 I-20 I-36
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id, n, was, mark)
SELECT j.job_id, a.n, 'failed',
  CASE WHEN j.due_ms < 0 THEN -j.due_ms ELSE j.attempt_count >= j.max_attempts END
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE +j.queue = :queue AND +j.status = 'failed';
UPDATE {jobs} AS j
SET status = CASE WHEN c.mark THEN 'dead_letter' ELSE 'queued' END, passed = '',
  ready = NOT c.mark AND j.due_ms <= :now_ms,
  due_ms = CASE WHEN c.mark OR j.due_ms <= :now_ms THEN 0 ELSE j.due_ms END,
  ver = j.ver + 1, updated_ms = :now_ms{count_event}
FROM temp.chosen c WHERE j.job_id = c.job_id;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, gid, priority, due_ms, max_attempts, error_code, told)
SELECT :queue, j.job_id, j.ver,
  CASE c.mark WHEN 0 THEN 'promote' WHEN 2 THEN 'cancel' WHEN 3 THEN 'expire' ELSE 'bury' END,
  :now_ms, j.task, 'failed', j.status, j.attempt_count, j.claim_version, j.claim_version, j.gid,
  j.priority, j.due_ms, j.max_attempts,
  CASE WHEN c.mark AND json_valid(j.error) THEN coalesce(json_extract(j.error, '$.code'), '') ELSE '' END,
  {told}
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id ORDER BY c.n;
{after_decide}
{tell_decided}
SELECT job_id, mark = 1 AS buried FROM temp.chosen;
