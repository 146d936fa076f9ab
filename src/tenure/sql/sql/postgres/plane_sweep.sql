-- Forgets messages of jobs that left the line, and sends again what Redis must have lost: what went
-- out long ago although everything that Redis holds is delivered, or later messages were long ago.
-- Takes: queue text, resend_ms bigint, empty boolean, delivered_redis_ms bigint, count integer
-- Returns: how many messages go out again
-- Clauses: P-4
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
old AS MATERIALIZED (
  SELECT m.job_id, m.sent_redis_ms, EXISTS (SELECT FROM {jobs} j WHERE j.job_id = m.job_id AND j.ready
      AND j.claim_version = m.enqueue_id) AS waits
  FROM plane_messages m, clock c
  WHERE m.queue = :queue AND m.sent_ms > 0 AND m.sent_ms < c.now_ms - :resend_ms
  ORDER BY m.sent_ms LIMIT :count
  FOR UPDATE OF m SKIP LOCKED
),
gone AS (
  DELETE FROM plane_messages m USING old o WHERE m.job_id = o.job_id AND NOT o.waits
),
again AS (
  UPDATE plane_messages m SET sent_ms = 0 FROM old o
  WHERE m.job_id = o.job_id AND o.waits
    AND (:empty OR o.sent_redis_ms < :delivered_redis_ms - :resend_ms)
  RETURNING 1
)
SELECT count(*) AS again FROM again
