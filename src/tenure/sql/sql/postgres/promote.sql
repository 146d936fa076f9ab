-- Puts jobs whose time has come into the line, and events whose earlier events have ended.
-- Takes: queue text, count integer, channel text
-- Returns: how many
-- Clauses: I-19 I-22
WITH due AS MATERIALIZED (
  SELECT job_id FROM {jobs}
  WHERE queue = :queue AND status = 'queued' AND NOT ready AND due_ms > 0 AND due_ms <= {now}
  ORDER BY due_ms LIMIT :count
  FOR UPDATE SKIP LOCKED
),
promoted AS (
  UPDATE {jobs} j SET ready = true FROM due d WHERE j.job_id = d.job_id AND j.status = 'queued'
  RETURNING j.job_id
),
told AS MATERIALIZED (SELECT pg_notify(:channel, :queue) FROM (SELECT 1 FROM promoted LIMIT 1) one)
SELECT count(*) AS promoted FROM promoted LEFT JOIN told ON true
