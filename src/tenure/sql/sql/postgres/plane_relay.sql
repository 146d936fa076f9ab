-- Says that a stream's messages travel through Redis, and makes messages for jobs that have none.
-- Takes: queue text
-- Returns: how many jobs were without one
-- Clauses: P-3 P-4
WITH named AS (
  INSERT INTO plane_streams (queue) VALUES (:queue) ON CONFLICT DO NOTHING
),
made AS (
  INSERT INTO plane_messages (job_id, queue, enqueue_id, seq)
  SELECT j.job_id, j.queue, j.claim_version, j.seq FROM {jobs} j
  WHERE j.queue = :queue AND j.ready
    AND NOT EXISTS (SELECT FROM plane_messages m WHERE m.job_id = j.job_id)
  ON CONFLICT DO NOTHING
  RETURNING 1
)
SELECT count(*) AS made FROM made
