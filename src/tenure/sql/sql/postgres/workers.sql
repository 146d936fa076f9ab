-- Who works on a queue, those included that have nothing to do.
-- Takes: queue text
-- Returns: a row for each worker that was heard of lately
-- Clauses: I-25
SELECT worker_id, seen_ms, slots FROM job_workers
WHERE queue = :queue AND seen_ms > {now} - 15000 ORDER BY worker_id
