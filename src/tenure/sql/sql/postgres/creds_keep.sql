-- Notes whether a queue keeps the sealed credentials of jobs that have ended.
-- Takes: queue text, kept boolean
-- Returns: nothing
-- Clauses: I-72
INSERT INTO job_queues (queue, keep_credentials) VALUES (:queue, :kept)
ON CONFLICT (queue) DO UPDATE SET keep_credentials = excluded.keep_credentials
