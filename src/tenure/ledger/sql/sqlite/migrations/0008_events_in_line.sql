-- Events are written by the statements that make most of the steps, together with their other rows.
-- Whoever raises `event_count` by one says so; of every other writer the trigger does it, row by row.
--
-- A journal row that came with an event names it in `told`, and is the submit of that event too: the
-- history of an outbox is a view, which reads one row as both. The rule of steps is asked only by
-- writes that could break it, and first whether it is one of the two steps that nearly all are.

ALTER TABLE job_journal ADD COLUMN told INTEGER NOT NULL DEFAULT 0;
CREATE INDEX job_journal_told ON job_journal (queue || '/outbox', seq) WHERE told > 0;

-- What each step is to the event that it told of.
CREATE VIEW job_event_submits AS
SELECT seq, queue || '/outbox' AS queue, job_id || '.' || told AS job_id, 1 AS ver, 'submit' AS type, ts_ms,
  0 AS fence, 0 AS prev_fence, 0 AS lease_until_ms, 0 AS prev_lease_until_ms, 0 AS due_ms,
  0 AS attempt, 10 AS max_attempts, 0 AS priority, 'webhook' AS task, '' AS from_state,
  'queued' AS to_state, '' AS token_h, '' AS worker_id, job_id AS gid, '' AS error_code,
  '' AS payload_h, '' AS result_h, '' AS data, NULL AS news_type, NULL AS news_step, NULL AS news
FROM job_journal WHERE told > 0;

-- For readers in bulk. Pages are read from both halves, each by its index.
CREATE VIEW job_outbox_journal AS
SELECT seq, queue, job_id, ver, type, ts_ms, fence, prev_fence, lease_until_ms, prev_lease_until_ms,
  due_ms, attempt, max_attempts, priority, task, from_state, to_state, token_h, worker_id, gid,
  error_code, payload_h, result_h, data, news_type, news_step, news
FROM job_journal
UNION ALL
SELECT seq, queue, job_id, ver, type, ts_ms, fence, prev_fence, lease_until_ms, prev_lease_until_ms,
  due_ms, attempt, max_attempts, priority, task, from_state, to_state, token_h, worker_id, gid,
  error_code, payload_h, result_h, data, news_type, news_step, news
FROM job_event_submits;

-- @for box in inbox_jobs job_outbox_events plane_jobs
DROP TRIGGER {box}_step;
CREATE TRIGGER {box}_step BEFORE UPDATE OF status, passed, claim_version ON {box}
WHEN (OLD.status <> NEW.status
    AND NOT (OLD.status = 'queued' AND NEW.status = 'claimed')
    AND NOT (OLD.status = 'claimed' AND NEW.status = 'succeeded'
      AND NEW.passed = 'fetching>processing>uploading>')
    AND CASE OLD.status || '>' || NEW.status
      WHEN 'claimed>fetching' THEN 0 WHEN 'fetching>processing' THEN 0
      WHEN 'processing>uploading' THEN 0 WHEN 'uploading>succeeded' THEN 0
      WHEN 'claimed>queued' THEN 0 WHEN 'fetching>queued' THEN 0 WHEN 'processing>queued' THEN 0
      WHEN 'uploading>queued' THEN 0 WHEN 'claimed>failed' THEN 0 WHEN 'fetching>failed' THEN 0
      WHEN 'processing>failed' THEN 0 WHEN 'uploading>failed' THEN 0 WHEN 'failed>queued' THEN 0
      WHEN 'failed>dead_letter' THEN 0 ELSE 1 END
    AND CASE OLD.status || '>' || NEW.passed || NEW.status
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
  AND NEW.event_count <> OLD.event_count + 1
BEGIN
  UPDATE inbox_jobs SET event_count = OLD.event_count + 1 WHERE seq = NEW.seq;
  INSERT INTO job_outbox_events (job_id, queue, task, gid, requester_id, max_attempts, ready,
      created_ms, updated_ms, status_webhook_url, trace, payload)
    SELECT NEW.job_id || '.' || (OLD.event_count + 1), NEW.queue || '/outbox', 'webhook', NEW.job_id,
      NEW.requester_id, 10, NOT EXISTS (SELECT 1 FROM job_outbox_events e
        WHERE e.gid = NEW.job_id AND e.status NOT IN ('succeeded', 'dead_letter')),
      NEW.updated_ms, NEW.updated_ms, NEW.status_webhook_url, NEW.trace,
    '{"event_id":' || json_quote(NEW.job_id || '.' || (OLD.event_count + 1)) || ',"job_id":'
      || json_quote(NEW.job_id) || ',"seq":' || (OLD.event_count + 1) || ',"status":"' || NEW.status
      || '","previous_status":"' || OLD.status || '","task":' || json_quote(NEW.task)
      || ',"attempt":' || NEW.attempt_count || ',"max_attempts":' || NEW.max_attempts
      || ',"occurred_ms":' || NEW.updated_ms
      || CASE WHEN NEW.status = 'succeeded'
          THEN ',"outputs":' || coalesce(nullif(NEW.result, ''), 'null')
        WHEN NEW.status IN ('failed', 'dead_letter')
          THEN ',"error":' || coalesce(nullif(NEW.error, ''), 'null')
        WHEN NEW.progress <> '' THEN ',"progress":' || NEW.progress ELSE '' END || '}';
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, to_state, max_attempts, gid)
    VALUES (NEW.queue || '/outbox', NEW.job_id || '.' || (OLD.event_count + 1), 1, 'submit',
      NEW.updated_ms, 'webhook', 'queued', 10, NEW.job_id);
END;
