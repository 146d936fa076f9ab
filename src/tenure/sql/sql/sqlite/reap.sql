-- Takes back leases that ran out: the job keeps its turn, or fails when no attempt or loss is left.
-- Takes: queue text, lost_max integer, count integer
-- Returns: for each lease taken back whether its job failed: `decide` ends it
-- Clauses: I-10 I-14
DELETE FROM temp.lapsed;
INSERT INTO temp.lapsed
SELECT job_id, status, lease_expires_at, worker_id, claimed_ms, claim_version, cancel_requested,
  cancel_requested OR lost_count + 1 >= :lost_max OR attempt_count >= max_attempts
FROM {jobs}
WHERE queue = :queue AND lease_expires_at > 0 AND lease_expires_at < :now_ms
  AND status IN {running}
ORDER BY lease_expires_at LIMIT :count;
UPDATE {jobs} AS j
SET status = CASE WHEN l.ends THEN 'failed' ELSE 'queued' END, passed = '', ready = NOT l.ends,
  due_ms = CASE WHEN l.cancelled THEN -2 WHEN l.ends THEN -1 ELSE 0 END,
  lost_count = j.lost_count + 1, lease_expires_at = 0, lease_token_h = '',
  worker_id = CASE WHEN l.ends THEN j.worker_id ELSE '' END, cancel_requested = 0,
  ver = j.ver + 1, updated_ms = :now_ms,
  error = CASE WHEN l.cancelled THEN '{"code":"cancelled","message":"cancelled on request; the '
      || 'worker let its lease run out","retryable":false}'
    WHEN l.ends THEN '{"code":"lease_lost","message":"the lease ran out ' || (j.lost_count + 1)
      || ' time(s) without an outcome, at start ' || j.attempt_count || ' of ' || j.max_attempts
      || ': each worker that took the job died, hung or was cut off","retryable":false}'
    ELSE j.error END
FROM temp.lapsed l
WHERE j.job_id = l.job_id AND j.claim_version = l.fence;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, worker_id, prev_lease_until_ms, gid, priority, max_attempts)
SELECT :queue, l.job_id, j.ver, 'reap', :now_ms, j.task, l.was,
  CASE WHEN l.ends THEN 'failed' ELSE 'queued' END, j.attempt_count, l.fence, l.fence, l.holder,
  l.lease_was, j.gid, j.priority, j.max_attempts
FROM temp.lapsed l JOIN {jobs} j ON j.job_id = l.job_id;
INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
  verdict, outcome_h, error_code)
SELECT l.job_id, l.fence, :queue, j.attempt_count, l.holder, l.claimed_ms, :now_ms, 'lost', '',
  'lease_lost'
FROM temp.lapsed l JOIN {jobs} j ON j.job_id = l.job_id{known_attempt};
SELECT job_id, ends FROM temp.lapsed;
