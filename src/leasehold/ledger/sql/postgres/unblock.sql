-- Lets events into the line whose earlier events ended while they were being written.
-- Takes: queue text, count integer
-- Returns: how many
-- Clauses: I-22
WITH free AS MATERIALIZED (
  SELECT j.job_id FROM {jobs} j
  WHERE j.queue = :queue AND j.status = 'queued' AND NOT j.ready AND j.due_ms = 0
    AND NOT EXISTS (SELECT FROM {jobs} e WHERE e.gid = j.gid AND e.seq < j.seq
      AND e.status NOT IN ('succeeded', 'dead_letter'))
  LIMIT :count
  FOR UPDATE SKIP LOCKED
),
freed AS (
  UPDATE {jobs} j SET ready = true FROM free f WHERE j.job_id = f.job_id AND j.status = 'queued'
  RETURNING j.job_id
)
SELECT count(*) AS freed FROM freed
