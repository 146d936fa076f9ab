-- Says that a worker is alive, and how many jobs it runs at once; 0 says nothing of that.
-- Takes: queue text, worker_id text, slots integer
-- Returns: nothing
-- Clauses: I-25
INSERT INTO job_workers (queue, worker_id, seen_ms, slots) VALUES (:queue, :worker_id, {now}, :slots)
ON CONFLICT (queue, worker_id) DO UPDATE SET seen_ms = excluded.seen_ms,
  slots = CASE WHEN excluded.slots > 0 THEN excluded.slots ELSE job_workers.slots END
