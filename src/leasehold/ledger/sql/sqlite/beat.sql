-- Says that a worker is alive.
-- Takes: queue text, worker_id text
-- Returns: nothing
-- Clauses: I-25
INSERT INTO job_workers (queue, worker_id, seen_ms) VALUES (:queue, :worker_id, :now_ms)
ON CONFLICT (queue, worker_id) DO UPDATE SET seen_ms = excluded.seen_ms;
