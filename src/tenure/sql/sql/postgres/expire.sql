-- Fails jobs that were not started within their time to live; `decide` ends them.
-- Takes: queue text, count integer
-- Returns: how many
-- Clauses: I-21
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
late AS MATERIALIZED (
  SELECT j.job_id, j.attempt_count = 0 AS ends FROM {jobs} j
  WHERE j.queue = :queue AND j.status = 'queued' AND j.expires_ms > 0
    AND j.expires_ms <= (SELECT now_ms FROM clock)
  ORDER BY j.expires_ms LIMIT :count
  FOR UPDATE SKIP LOCKED
),
started AS (
  UPDATE {jobs} j SET expires_ms = 0 FROM late l WHERE j.job_id = l.job_id AND NOT l.ends
),
ended AS (
  UPDATE {jobs} j
  SET status = 'failed', passed = 'claimed>', ready = false, due_ms = -3,
    ver = j.ver + 1, updated_ms = c.now_ms,
    error = '{"code":"expired","message":"not started within its time to live","retryable":false}'
  FROM late l, clock c
  WHERE j.job_id = l.job_id AND l.ends
  RETURNING j.job_id, j.ver, j.task, j.attempt_count, j.claim_version, j.gid, j.priority,
    j.max_attempts, j.updated_ms
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, gid, priority, max_attempts, error_code)
  SELECT :queue, job_id, ver, 'fail', updated_ms, task, 'queued', 'failed', attempt_count,
    claim_version, claim_version, gid, priority, max_attempts, 'expired'
  FROM ended
)
SELECT count(*) AS expired FROM ended
