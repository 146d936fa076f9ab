-- Takes back the mark of messages that could not be sent.
-- Batch: job_id text, enqueue_id bigint
-- Returns: how many
-- Clauses: P-3
UPDATE plane_messages SET sent_ms = 0
WHERE EXISTS (SELECT 1 FROM {batch} a
  WHERE a.job_id = plane_messages.job_id AND a.enqueue_id = plane_messages.enqueue_id);
SELECT changes() AS unsent;
