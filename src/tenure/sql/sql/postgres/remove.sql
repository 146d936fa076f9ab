-- Deletes jobs that nobody runs, with all that belongs to them.
-- Batch: job_id text
-- Takes: queue text
-- Returns: for each known job its number and the state that was found
-- Clauses: I-28
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
found AS MATERIALIZED (
  SELECT a.n, j.job_id, j.status AS was
  FROM (SELECT * FROM {batch}) a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.queue = :queue
  ORDER BY j.job_id
  FOR UPDATE OF j
),
gone AS (
  DELETE FROM {jobs} j USING found f
  WHERE j.job_id = f.job_id AND (f.was NOT IN {running}) IS TRUE
  RETURNING j.job_id, j.ver, j.task, j.status, j.attempt_count, j.claim_version
),
attempts AS (
  DELETE FROM job_attempts t USING gone g WHERE t.job_id = g.job_id AND t.queue = :queue
),
keys AS (
  DELETE FROM idempotency_keys k USING gone g
  WHERE k.job_id = g.job_id COLLATE "default" AND k.queue || '' = :queue
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, attempt, fence,
    prev_fence)
  SELECT :queue, g.job_id, g.ver + 1, 'remove', c.now_ms, g.task, g.status, g.attempt_count,
    g.claim_version, g.claim_version
  FROM gone g, clock c
)
SELECT n, was FROM found
