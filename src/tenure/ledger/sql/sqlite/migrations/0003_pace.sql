-- What made the ledger slower than it must be: a list of states that was built anew for every row, and
-- events that were read back from their jobs.

-- @for box in inbox_jobs job_outbox_events plane_jobs
DROP TRIGGER {box}_step;
CREATE TRIGGER {box}_step BEFORE UPDATE ON {box}
WHEN (OLD.status <> NEW.status
    AND CASE OLD.status || '>' || NEW.status
      WHEN 'queued>claimed' THEN 0 WHEN 'claimed>fetching' THEN 0 WHEN 'fetching>processing' THEN 0
      WHEN 'processing>uploading' THEN 0 WHEN 'uploading>succeeded' THEN 0
      WHEN 'claimed>queued' THEN 0 WHEN 'fetching>queued' THEN 0 WHEN 'processing>queued' THEN 0
      WHEN 'uploading>queued' THEN 0 WHEN 'claimed>failed' THEN 0 WHEN 'fetching>failed' THEN 0
      WHEN 'processing>failed' THEN 0 WHEN 'uploading>failed' THEN 0 WHEN 'failed>queued' THEN 0
      WHEN 'failed>dead_letter' THEN 0 ELSE 1 END
    AND CASE OLD.status || '>' || NEW.passed || NEW.status
      WHEN 'claimed>fetching>processing>uploading>succeeded' THEN 0
      WHEN 'fetching>processing>uploading>succeeded' THEN 0
      WHEN 'processing>uploading>succeeded' THEN 0 WHEN 'claimed>fetching>processing' THEN 0
      WHEN 'claimed>fetching>processing>uploading' THEN 0
      WHEN 'fetching>processing>uploading' THEN 0 WHEN 'claimed>failed>dead_letter' THEN 0
      WHEN 'fetching>failed>dead_letter' THEN 0 WHEN 'processing>failed>dead_letter' THEN 0
      WHEN 'uploading>failed>dead_letter' THEN 0 WHEN 'queued>claimed>failed>dead_letter' THEN 0
      ELSE 1 END)
  OR (NEW.status = 'claimed' AND NEW.passed <> '')
  OR NEW.claim_version <> OLD.claim_version
    + (CASE WHEN OLD.status = 'queued' AND NEW.status = 'claimed' THEN 1 ELSE 0 END)
  OR (OLD.status = 'failed' AND NEW.status = 'queued' AND OLD.attempt_count >= OLD.max_attempts)
BEGIN
  SELECT RAISE(ABORT, 'transition: the table has no such step');
END;
-- @end

DROP TRIGGER inbox_jobs_tell;
CREATE TRIGGER inbox_jobs_tell AFTER UPDATE OF status ON inbox_jobs
WHEN OLD.status <> NEW.status AND NEW.status_webhook_url IS NOT NULL
BEGIN
  UPDATE inbox_jobs SET event_count = NEW.event_count + 1 WHERE seq = NEW.seq;
  INSERT INTO job_outbox_events (job_id, queue, task, gid, requester_id, max_attempts, ready,
      created_ms, updated_ms, status_webhook_url, trace, payload)
    SELECT NEW.job_id || '.' || (NEW.event_count + 1), NEW.queue || '/outbox', 'webhook', NEW.job_id,
      NEW.requester_id, 10, NOT EXISTS (SELECT 1 FROM job_outbox_events e
        WHERE e.gid = NEW.job_id AND e.status NOT IN ('succeeded', 'dead_letter')),
      NEW.updated_ms, NEW.updated_ms, NEW.status_webhook_url, NEW.trace,
      rtrim(json_object('event_id', NEW.job_id || '.' || (NEW.event_count + 1),
        'job_id', NEW.job_id, 'seq', NEW.event_count + 1, 'status', NEW.status,
        'previous_status', OLD.status, 'task', NEW.task, 'attempt', NEW.attempt_count,
        'max_attempts', NEW.max_attempts, 'occurred_ms', NEW.updated_ms), '}')
      || CASE WHEN NEW.status = 'succeeded'
          THEN ',"outputs":' || coalesce(nullif(NEW.result, ''), 'null')
        WHEN NEW.status IN ('failed', 'dead_letter')
          THEN ',"error":' || coalesce(nullif(NEW.error, ''), 'null')
        WHEN NEW.progress <> '' THEN ',"progress":' || NEW.progress ELSE '' END || '}';
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, to_state, max_attempts, gid)
    VALUES (NEW.queue || '/outbox', NEW.job_id || '.' || (NEW.event_count + 1), 1, 'submit',
      NEW.updated_ms, 'webhook', 'queued', 10, NEW.job_id);
END;
