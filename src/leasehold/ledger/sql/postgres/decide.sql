-- Leads jobs on that rest in `failed`: back to the line while attempts are left and nobody gave them
-- up, else to their end. `due_ms` says when, or why not: -1 given up, -2 cancelled, -3 expired.
-- Batch: job_id text
-- Takes: queue text
-- Returns: for each whether it was given up
-- Clauses: I-6 I-20
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
resting AS MATERIALIZED (
  SELECT j.job_id, j.due_ms AS why, j.due_ms < 0 OR j.attempt_count >= j.max_attempts AS ends
  FROM (SELECT * FROM {batch}) a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.queue = :queue AND j.status = 'failed'
  ORDER BY j.job_id
  FOR UPDATE OF j
),
ended AS (
  UPDATE {jobs} j
  SET status = CASE WHEN r.ends THEN 'dead_letter' ELSE 'queued' END, passed = '',
    ready = NOT r.ends AND r.why <= c.now_ms,
    due_ms = CASE WHEN r.ends OR r.why <= c.now_ms THEN 0 ELSE r.why END,
    ver = j.ver + 1, updated_ms = c.now_ms
  FROM resting r, clock c
  WHERE j.job_id = r.job_id AND j.status = 'failed'
  RETURNING j.job_id, r.why, r.ends, j.ver, j.task, j.status, j.attempt_count, j.claim_version, j.gid,
    j.priority, j.due_ms, j.max_attempts, j.updated_ms, j.error
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, gid, priority, due_ms, max_attempts, error_code)
  SELECT :queue, job_id, ver, CASE WHEN NOT ends THEN 'promote' WHEN why = -2 THEN 'cancel'
      WHEN why = -3 THEN 'expire' ELSE 'bury' END, updated_ms, task, 'failed', status, attempt_count,
    claim_version, claim_version, gid, priority, due_ms, max_attempts,
    CASE WHEN ends THEN coalesce(substring(error FROM '"code":"([^"]*)"'), '') ELSE '' END
  FROM ended
){after_settle}
SELECT job_id, ends AND why > -2 AS buried{tells_freed} FROM ended
