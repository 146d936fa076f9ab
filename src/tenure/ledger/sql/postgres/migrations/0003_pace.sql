-- What made the ledger slower than it must be.
--
-- A row trigger before an insert makes COPY put its rows in one by one. After it, the rule is the
-- same: what it refuses is undone with the statement.
--
-- `gid` of an event is the id of its job, and both are compared by their bytes: in two collations the
-- index of an outbox would be read from one end to the other for every event.

-- @for box in inbox_jobs job_outbox_events plane_jobs
DROP TRIGGER {box}_begin ON {box};
CREATE TRIGGER {box}_begin AFTER INSERT ON {box} FOR EACH ROW
  WHEN (NEW.status <> 'queued') EXECUTE FUNCTION {box}_refuse();

ALTER TABLE {box} ALTER COLUMN gid TYPE text COLLATE "C";
-- @end

-- The events of all jobs that one statement moved are written together. What joins old and new rows
-- is fixed: a plan made for one job would be kept for a thousand.
DROP TRIGGER inbox_jobs_tell ON inbox_jobs;
DROP FUNCTION tell_requester();

CREATE FUNCTION tell_requesters() RETURNS trigger LANGUAGE plpgsql
  SET enable_hashjoin = on SET enable_nestloop = off AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM fresh WHERE status_webhook_url IS NOT NULL) THEN
    RETURN NULL;
  END IF;
  WITH moved AS MATERIALIZED (
    SELECT n.job_id || '.' || n.event_count AS event_id, n.job_id, n.queue || '/outbox' AS box,
      n.requester_id, n.updated_ms, n.status_webhook_url, n.trace,
      left(json_build_object('event_id', n.job_id || '.' || n.event_count, 'job_id', n.job_id,
        'seq', n.event_count, 'status', n.status, 'previous_status', o.status, 'task', n.task,
        'attempt', n.attempt_count, 'max_attempts', n.max_attempts,
        'occurred_ms', n.updated_ms)::text, -1)
      || CASE WHEN n.status = 'succeeded'
          THEN ', "outputs": ' || coalesce(nullif(n.result, ''), 'null')
        WHEN n.status IN ('failed', 'dead_letter')
          THEN ', "error": ' || coalesce(nullif(n.error, ''), 'null')
        WHEN n.progress <> '' THEN ', "progress": ' || n.progress ELSE '' END || '}' AS body
    FROM fresh n LEFT JOIN stale o ON o.job_id = n.job_id
    WHERE n.status_webhook_url IS NOT NULL AND n.status IS DISTINCT FROM o.status
  ),
  stored AS (
    INSERT INTO job_outbox_events (job_id, queue, task, gid, requester_id, max_attempts, ready,
      created_ms, updated_ms, status_webhook_url, trace, payload)
    SELECT m.event_id, m.box, 'webhook', m.job_id, m.requester_id, 10,
      (SELECT earlier.seq FROM job_outbox_events earlier WHERE earlier.gid = m.job_id
        AND earlier.status NOT IN ('succeeded', 'dead_letter') LIMIT 1) IS NULL,
      m.updated_ms, m.updated_ms, m.status_webhook_url, m.trace, m.body
    FROM moved m
    RETURNING job_id, queue, gid, created_ms
  )
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, to_state, max_attempts, gid)
    SELECT queue, job_id, 1, 'submit', created_ms, 'webhook', 'queued', 10, gid FROM stored;
  IF FOUND THEN
    PERFORM pg_notify(current_schema() || '_jobs', box) FROM (
      SELECT DISTINCT queue || '/outbox' AS box FROM fresh) boxes;
  END IF;
  RETURN NULL;
END $$;

CREATE TRIGGER inbox_jobs_tell AFTER UPDATE ON inbox_jobs
  REFERENCING OLD TABLE AS stale NEW TABLE AS fresh FOR EACH STATEMENT
  EXECUTE FUNCTION tell_requesters();
