-- What else is to be known of a queue: paused, how long its oldest job waits, who works.
-- Takes: queue text
-- Returns: one row
-- Clauses: I-25
SELECT :now_ms AS now_ms,
  coalesce((SELECT paused FROM job_queues WHERE queue = :queue), 0) AS paused,
  coalesce((SELECT created_ms FROM {jobs} WHERE queue = :queue AND ready
    ORDER BY priority, seq LIMIT 1), 0) AS oldest_ms,
  (SELECT count(*) FROM (
    SELECT worker_id FROM job_workers WHERE queue = :queue AND seen_ms > :now_ms - 15000
    UNION SELECT worker_id FROM {jobs} WHERE queue = :queue AND lease_expires_at > 0)) AS workers;
