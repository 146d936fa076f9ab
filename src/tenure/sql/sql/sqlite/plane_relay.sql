-- Says that a stream's messages travel through Redis, and makes messages for jobs that have none.
-- Takes: queue text
-- Returns: how many jobs were without one
-- Clauses: P-3 P-4
INSERT OR IGNORE INTO plane_streams (queue) VALUES (:queue);
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id)
SELECT j.job_id FROM {jobs} j WHERE j.queue = :queue AND j.ready
  AND NOT EXISTS (SELECT 1 FROM plane_messages m WHERE m.job_id = j.job_id);
INSERT INTO plane_messages (job_id, queue, enqueue_id, seq)
SELECT j.job_id, j.queue, j.claim_version, j.seq
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id;
SELECT count(*) AS made FROM temp.chosen;
