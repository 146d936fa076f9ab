-- Takes back the mark of messages that could not be sent.
-- Batch: job_id text, enqueue_id bigint
-- Returns: how many
-- Clauses: P-3
WITH asked AS MATERIALIZED (SELECT * FROM {batch}),
unsent AS (
  UPDATE plane_messages m SET sent_ms = 0 FROM asked a
  WHERE m.job_id = a.job_id AND m.enqueue_id = a.enqueue_id RETURNING 1
)
SELECT count(*) AS unsent FROM unsent
