-- Writes what is there already, to find out whether the database takes writes.
-- Takes: queue text
-- Returns: nothing
-- Clauses: I-29
INSERT INTO job_queues (queue) VALUES (:queue)
ON CONFLICT (queue) DO UPDATE SET paused = job_queues.paused
