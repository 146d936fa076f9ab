-- Marks messages as being sent, oldest turn first: whoever marked one sends it.
-- Takes: queue text, count integer, redis_ms bigint
-- Returns: the messages to send, and whether their jobs have been claimed before
-- Clauses: P-3
WITH unsent AS MATERIALIZED (
  SELECT job_id FROM plane_messages WHERE queue = :queue AND sent_ms = 0
  ORDER BY seq LIMIT :count FOR UPDATE SKIP LOCKED
),
marked AS (
  UPDATE plane_messages m SET sent_ms = {now}, sent_redis_ms = :redis_ms
  FROM unsent u WHERE m.job_id = u.job_id
  RETURNING m.job_id, m.enqueue_id, m.enqueue_id > 0 AS again, m.seq
)
SELECT job_id, enqueue_id, again FROM marked ORDER BY seq
