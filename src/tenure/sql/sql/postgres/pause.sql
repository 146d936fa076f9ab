-- Stops or resumes handing out leases; waits for claims under way.
-- Takes: queue text, paused boolean, channel text
-- Returns: nothing
-- Clauses: I-29
WITH gate AS MATERIALIZED (
  SELECT pg_advisory_xact_lock(hashtext(current_schema()), hashtext(:queue))
),
changed AS (
  INSERT INTO job_queues (queue, paused) SELECT :queue, :paused FROM gate
  ON CONFLICT (queue) DO UPDATE SET paused = excluded.paused
  WHERE job_queues.paused IS DISTINCT FROM excluded.paused
  RETURNING queue
),
noted AS (
  INSERT INTO job_journal (queue, job_id, type, ts_ms)
  SELECT queue, '', CASE WHEN :paused THEN 'pause' ELSE 'resume' END, {now} FROM changed
)
SELECT pg_notify(:channel, :queue) FROM changed
