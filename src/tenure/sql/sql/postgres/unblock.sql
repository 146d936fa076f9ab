-- Lets events into the line whose earlier events ended while they were being written.
-- Takes: queue text, after bigint, count integer
-- Returns: how many, and the last turn that was looked at (0 when there are no later ones)
-- Clauses: I-22
WITH window_ AS MATERIALIZED (
  SELECT j.job_id, j.seq FROM {jobs} j
  WHERE j.queue = :queue AND j.status = 'queued' AND NOT j.ready AND j.due_ms = 0 AND j.seq > :after
  ORDER BY j.seq LIMIT :count
),
free AS MATERIALIZED (
  SELECT j.job_id FROM window_ w JOIN {jobs} j ON j.job_id = w.job_id
  WHERE (j.status = 'queued') IS TRUE AND NOT j.ready
    AND {in_turn}
  FOR UPDATE OF j SKIP LOCKED
),
freed AS (
  UPDATE {jobs} j SET ready = true FROM free f WHERE j.job_id = f.job_id AND j.status = 'queued'
  RETURNING j.job_id
)
SELECT (SELECT count(*) FROM freed) AS freed,
  CASE WHEN count(*) < :count THEN 0 ELSE max(seq) END AS last
FROM window_
