-- Moves jobs out of `failed`: back to the line while attempts are left and they were not given up,
-- else to their end. `due_ms` says when, or why not: -1 given up, -2 cancelled, -3 expired.
-- Batch: job_id text
-- Takes: queue text
-- Returns: for each whether it was given up; of the inbox whether it has an event
-- Clauses: I-6 I-20 I-36
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
resting AS MATERIALIZED (
  SELECT j.job_id, j.due_ms AS why,
    CASE WHEN j.due_ms < 0 THEN -j.due_ms WHEN j.attempt_count >= j.max_attempts THEN 1 ELSE 0 END AS mark
  FROM (SELECT * FROM {batch}) a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.queue = :queue AND (j.status = 'failed') IS TRUE
  ORDER BY j.job_id
  FOR UPDATE OF j
),
ended AS (
  UPDATE {jobs} j
  SET status = CASE WHEN r.mark > 0 THEN 'dead_letter' ELSE 'queued' END, passed = '',
    ready = r.mark = 0 AND r.why <= c.now_ms,
    due_ms = CASE WHEN r.mark > 0 OR r.why <= c.now_ms THEN 0 ELSE r.why END,
    ver = j.ver + 1, updated_ms = c.now_ms{count_event}
  FROM resting r, clock c
  WHERE j.job_id = r.job_id AND (j.status = 'failed') IS TRUE
  RETURNING j.job_id, 'failed' AS was, r.mark, j.ver, j.task, j.status, j.attempt_count, j.claim_version,
    j.gid, j.priority, j.due_ms, j.max_attempts, j.updated_ms, j.requester_id, j.status_webhook_url,
    j.trace, coalesce(substring(j.error FROM '"code":"([^"]*)"'), '') AS code{event_columns}
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, gid, priority, due_ms, max_attempts, error_code, told)
  SELECT :queue, job_id, ver,
    CASE mark WHEN 0 THEN 'promote' WHEN 2 THEN 'cancel' WHEN 3 THEN 'expire' ELSE 'bury' END,
    updated_ms, task, was, status, attempt_count, claim_version, claim_version, gid, priority, due_ms,
    max_attempts, CASE WHEN mark > 0 THEN code ELSE '' END, {told}
  FROM ended
){after_settle}{tell_ended}
SELECT job_id, mark = 1 AS buried{tells} FROM ended
