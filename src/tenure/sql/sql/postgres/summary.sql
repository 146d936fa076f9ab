-- What else is to be known of a queue: paused, how long its oldest job waits, who works.
-- Takes: queue text
-- Returns: one row
-- Clauses: I-25
SELECT {now} AS now_ms,
  coalesce((SELECT paused FROM job_queues WHERE queue = :queue), false) AS paused,
  coalesce((SELECT created_ms FROM {jobs} WHERE queue = :queue AND ready
    ORDER BY priority, seq LIMIT 1), 0) AS oldest_ms,
  (SELECT count(*) FROM (
    SELECT worker_id FROM job_workers WHERE queue = :queue AND seen_ms > {now} - 15000
    UNION SELECT worker_id FROM {jobs} WHERE queue = :queue AND status IN {running}) w) AS workers
