-- Stops or resumes handing out leases; waits for claims under way.
-- Takes: queue text, paused boolean, channel text
-- Returns: nothing
-- Clauses: I-29
INSERT INTO job_journal (queue, job_id, type, ts_ms)
SELECT :queue, '', CASE WHEN :paused THEN 'pause' ELSE 'resume' END, :now_ms
WHERE coalesce((SELECT paused FROM job_queues WHERE queue = :queue), 0) <> :paused;
INSERT INTO job_queues (queue, paused) VALUES (:queue, :paused)
ON CONFLICT (queue) DO UPDATE SET paused = excluded.paused;
