-- Forgets messages of jobs that left the line, and sends again what Redis must have lost: what went
-- out long ago although everything that Redis holds is delivered, or later messages were long ago.
-- Takes: queue text, resend_ms bigint, empty boolean, delivered_redis_ms bigint, count integer
-- Returns: how many messages go out again
-- Clauses: P-4
DELETE FROM plane_messages WHERE job_id IN (
  SELECT m.job_id FROM plane_messages m
  WHERE m.queue = :queue AND m.sent_ms > 0 AND m.sent_ms < :now_ms - :resend_ms
    AND NOT EXISTS (SELECT 1 FROM {jobs} j WHERE j.job_id = m.job_id AND j.ready
      AND j.claim_version = m.enqueue_id)
  LIMIT :count);
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id)
SELECT job_id FROM plane_messages WHERE queue = :queue AND sent_ms > 0
  AND sent_ms < :now_ms - :resend_ms
  AND (:empty OR sent_redis_ms < :delivered_redis_ms - :resend_ms)
ORDER BY sent_ms LIMIT :count;
UPDATE plane_messages SET sent_ms = 0 WHERE job_id IN (SELECT job_id FROM temp.chosen);
SELECT count(*) AS again FROM temp.chosen;
