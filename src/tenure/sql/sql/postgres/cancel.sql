-- Fails waiting jobs, by the only walk that the table has for them, and marks running ones for their
-- holders; `decide` ends what failed.
-- Batch: job_id text
-- Takes: queue text
-- Returns: for each known job its number and the state that was found
-- Clauses: I-6 I-26
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
found AS MATERIALIZED (
  SELECT a.n, j.job_id, j.status AS was
  FROM (SELECT * FROM {batch}) a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.queue = :queue
  ORDER BY j.job_id
  FOR UPDATE OF j
),
marked AS (
  UPDATE {jobs} j SET cancel_requested = true FROM found f
  WHERE j.job_id = f.job_id AND (f.was IN {running}) IS TRUE
),
ended AS (
  UPDATE {jobs} j
  SET status = 'failed', ready = false, due_ms = -2, updated_ms = c.now_ms,
    ver = j.ver + CASE WHEN f.was = 'queued' THEN 1 ELSE 0 END,
    passed = CASE WHEN f.was = 'queued' THEN 'claimed>' ELSE '' END,
    error = '{"code":"cancelled","message":"cancelled on request","retryable":false}'
  FROM found f, clock c
  WHERE j.job_id = f.job_id AND f.was IN ('queued', 'failed')
  RETURNING j.job_id, f.was, j.ver, j.task, j.attempt_count, j.claim_version, j.gid, j.priority,
    j.max_attempts, j.updated_ms
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, gid, priority, max_attempts, error_code)
  SELECT :queue, job_id, ver, 'fail', updated_ms, task, was, 'failed', attempt_count,
    claim_version, claim_version, gid, priority, max_attempts, 'cancelled'
  FROM ended WHERE was = 'queued'
)
SELECT n, was FROM found
