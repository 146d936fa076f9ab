-- Decides about jobs that rest in `failed`: back to the line while attempts are left, else dead letter.
-- Takes: queue text, count integer
-- Returns: for each whether its job ended
-- Clauses: I-6
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
resting AS MATERIALIZED (
  SELECT j.job_id, j.attempt_count >= j.max_attempts AS ends FROM {jobs} j
  WHERE j.queue = :queue AND j.status = 'failed' LIMIT :count
  FOR UPDATE SKIP LOCKED
),
decided AS (
  UPDATE {jobs} j
  SET status = CASE WHEN r.ends THEN 'dead_letter' ELSE 'queued' END, passed = '',
    ready = NOT r.ends, due_ms = 0, ver = j.ver + 1, updated_ms = c.now_ms
  FROM resting r, clock c
  WHERE j.job_id = r.job_id
  RETURNING j.job_id, r.ends, j.ver, j.task, j.status, j.attempt_count, j.claim_version, j.gid,
    j.priority, j.max_attempts, j.updated_ms
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, gid, priority, max_attempts)
  SELECT :queue, job_id, ver, CASE WHEN ends THEN 'bury' ELSE 'retry' END, updated_ms, task, 'failed',
    status, attempt_count, claim_version, claim_version, gid, priority, max_attempts
  FROM decided
)
SELECT job_id, ends AS buried FROM decided
