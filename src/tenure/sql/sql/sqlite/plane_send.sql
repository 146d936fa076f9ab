-- Marks messages as being sent, oldest turn first: whoever marked one sends it.
-- Takes: queue text, count integer, redis_ms bigint
-- Returns: the messages to send, and whether their jobs have been claimed before
-- Clauses: P-3
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id)
SELECT job_id FROM plane_messages WHERE queue = :queue AND sent_ms = 0 ORDER BY seq LIMIT :count;
UPDATE plane_messages SET sent_ms = :now_ms, sent_redis_ms = :redis_ms
WHERE job_id IN (SELECT job_id FROM temp.chosen);
SELECT m.job_id, m.enqueue_id, m.enqueue_id > 0 AS again
FROM temp.chosen c JOIN plane_messages m ON m.job_id = c.job_id ORDER BY m.seq;
