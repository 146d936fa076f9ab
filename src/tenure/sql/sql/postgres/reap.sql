-- Takes back leases that ran out: the job keeps its turn, or fails when no attempt or loss is left.
-- Takes: queue text, lost_max integer, count integer
-- Returns: for each lease taken back whether its job failed: `decide` ends it
-- Clauses: I-10 I-14
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
lapsed AS MATERIALIZED (
  SELECT j.job_id, j.status AS was, j.lease_expires_at AS lease_was, j.worker_id AS holder,
    j.claimed_ms, j.claim_version AS fence, j.cancel_requested AS cancelled,
    j.cancel_requested OR j.lost_count + 1 >= :lost_max OR j.attempt_count >= j.max_attempts AS ends
  FROM {jobs} j
  WHERE j.queue = :queue AND j.status IN {running} AND j.lease_expires_at < (SELECT now_ms FROM clock)
  ORDER BY j.lease_expires_at LIMIT :count
  FOR UPDATE SKIP LOCKED
),
reaped AS (
  UPDATE {jobs} j
  SET status = CASE WHEN l.ends THEN 'failed' ELSE 'queued' END, passed = '', ready = NOT l.ends,
    due_ms = CASE WHEN l.cancelled THEN -2 WHEN l.ends THEN -1 ELSE 0 END,
    lost_count = j.lost_count + 1, lease_expires_at = 0, lease_token_h = '',
    worker_id = CASE WHEN l.ends THEN j.worker_id ELSE '' END, cancel_requested = false,
    ver = j.ver + 1, updated_ms = c.now_ms,
    error = CASE WHEN l.cancelled THEN '{"code":"cancelled","message":"cancelled on request; the '
        || 'worker let its lease run out","retryable":false}'
      WHEN l.ends THEN '{"code":"lease_lost","message":"the lease ran out ' || j.lost_count + 1
        || ' time(s) without an outcome, at start ' || j.attempt_count || ' of ' || j.max_attempts
        || ': each worker that took the job died, hung or was cut off","retryable":false}'
      ELSE j.error END
  FROM lapsed l, clock c
  WHERE j.job_id = l.job_id AND j.claim_version = l.fence
  RETURNING j.job_id, l.was, l.lease_was, l.holder, l.claimed_ms, l.fence, l.ends, j.ver,
    j.task, j.attempt_count, j.max_attempts, j.gid, j.priority, j.updated_ms
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, worker_id, prev_lease_until_ms, gid, priority, max_attempts)
  SELECT :queue, job_id, ver, 'reap', updated_ms, task, was,
    CASE WHEN ends THEN 'failed' ELSE 'queued' END, attempt_count, fence, fence, holder, lease_was, gid,
    priority, max_attempts
  FROM reaped ORDER BY job_id
),
kept AS (
  INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
    verdict, outcome_h, error_code)
  SELECT job_id, fence, :queue, attempt_count, holder, claimed_ms, updated_ms, 'lost', '',
    'lease_lost'
  FROM reaped{known_attempt}
)
SELECT job_id, ends FROM reaped
