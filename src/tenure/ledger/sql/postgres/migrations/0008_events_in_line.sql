-- Events are written by the statements that make most of the steps, together with their other rows.
-- Whoever raises `event_count` by one says so; of every other writer the trigger does it, row by row.
--
-- A journal row that came with an event names it in `told`, and is the submit of that event too: the
-- history of an outbox is a view, which reads one row as both. The rule of steps is asked only by
-- writes that could break it, and first whether it is one of the two steps that nearly all are.

ALTER TABLE job_journal ADD COLUMN told integer NOT NULL DEFAULT 0;
CREATE INDEX job_journal_told ON job_journal ((queue || '/outbox'), seq) WHERE told > 0;

-- What each step is to the event that it told of.
CREATE VIEW job_event_submits AS
SELECT seq, queue || '/outbox' AS queue, job_id || '.' || told AS job_id, 1::bigint AS ver, 'submit'::text AS type, ts_ms,
  0::bigint AS fence, 0::bigint AS prev_fence, 0::bigint AS lease_until_ms, 0::bigint AS prev_lease_until_ms, 0::bigint AS due_ms,
  0 AS attempt, 10 AS max_attempts, 0 AS priority, 'webhook'::text AS task, ''::text AS from_state,
  'queued'::text AS to_state, ''::text AS token_h, ''::text AS worker_id, job_id AS gid, ''::text AS error_code,
  ''::text AS payload_h, ''::text AS result_h, ''::text AS data, NULL::text AS news_type, NULL::text AS news_step, NULL::text AS news
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
DROP TRIGGER {box}_step ON {box};
CREATE TRIGGER {box}_step BEFORE UPDATE OF status, passed, claim_version ON {box} FOR EACH ROW
  WHEN (
    (OLD.status <> NEW.status
      AND NOT (OLD.status = 'queued' AND NEW.status = 'claimed')
      AND NOT (OLD.status = 'claimed' AND NEW.status = 'succeeded'
        AND NEW.passed = 'fetching>processing>uploading>')
      AND NOT (OLD.status || '>' || NEW.status = ANY (ARRAY[
        'claimed>fetching', 'fetching>processing', 'processing>uploading', 'uploading>succeeded',
        'claimed>queued', 'fetching>queued', 'processing>queued', 'uploading>queued',
        'claimed>failed', 'fetching>failed', 'processing>failed', 'uploading>failed',
        'failed>queued', 'failed>dead_letter']))
      AND NOT (OLD.status || '>' || NEW.passed || NEW.status = ANY (ARRAY[
        'claimed>fetching>processing', 'claimed>fetching>processing>uploading',
        'fetching>processing>uploading', 'fetching>processing>uploading>succeeded',
        'processing>uploading>succeeded', 'claimed>failed>dead_letter',
        'fetching>failed>dead_letter', 'processing>failed>dead_letter',
        'uploading>failed>dead_letter', 'queued>claimed>failed>dead_letter'])))
    OR (NEW.status = 'claimed' AND NEW.passed <> '')
    OR NEW.claim_version <> OLD.claim_version
      + (CASE WHEN OLD.status = 'queued' AND NEW.status = 'claimed' THEN 1 ELSE 0 END)
    OR (OLD.status = 'failed' AND NEW.status = 'queued' AND OLD.attempt_count >= OLD.max_attempts)
  )
  EXECUTE FUNCTION {box}_refuse();
-- @end

-- Simple enough to become part of the statement that calls it.
CREATE FUNCTION event_body(job_id text, number integer, status text, was text, task text,
  attempt integer, max_attempts integer, at_ms bigint, result text, error text, progress text)
RETURNS text LANGUAGE sql STABLE AS $$
  SELECT '{"event_id":' || left(to_json(job_id)::text, -1) || '.' || number || '","job_id":'
    || to_json(job_id)::text || ',"seq":' || number || ',"status":"' || status
    || '","previous_status":"' || was || '","task":' || to_json(task)::text
    || ',"attempt":' || attempt || ',"max_attempts":' || max_attempts || ',"occurred_ms":' || at_ms
    || CASE WHEN status = 'succeeded' THEN ',"outputs":' || coalesce(nullif(result, ''), 'null')
      WHEN status IN ('failed', 'dead_letter') THEN ',"error":' || coalesce(nullif(error, ''), 'null')
      WHEN progress <> '' THEN ',"progress":' || progress ELSE '' END || '}'
$$;

DROP TRIGGER inbox_jobs_tell ON inbox_jobs;
DROP TRIGGER inbox_jobs_count_event ON inbox_jobs;
DROP FUNCTION tell_requesters();
DROP FUNCTION count_event();

CREATE FUNCTION tell_requester() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  number integer := OLD.event_count + 1;
  id text := NEW.job_id || '.' || number;
  box text := NEW.queue || '/outbox';
BEGIN
  NEW.event_count := number;
  INSERT INTO job_outbox_events (job_id, queue, task, gid, requester_id, max_attempts, ready,
      created_ms, updated_ms, status_webhook_url, trace, payload)
    VALUES (id, box, 'webhook', NEW.job_id, NEW.requester_id, 10,
      (SELECT earlier.seq FROM job_outbox_events earlier WHERE earlier.gid = NEW.job_id
        AND earlier.status NOT IN ('succeeded', 'dead_letter') LIMIT 1) IS NULL,
      NEW.updated_ms, NEW.updated_ms, NEW.status_webhook_url, NEW.trace,
      event_body(NEW.job_id, number, NEW.status, OLD.status, NEW.task, NEW.attempt_count,
        NEW.max_attempts, NEW.updated_ms, NEW.result, NEW.error, NEW.progress));
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, to_state, max_attempts, gid)
    VALUES (box, id, 1, 'submit', NEW.updated_ms, 'webhook', 'queued', 10, NEW.job_id);
  PERFORM pg_notify(current_schema() || '_jobs', box);
  RETURN NEW;
END $$;

CREATE TRIGGER inbox_jobs_tell BEFORE UPDATE ON inbox_jobs FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NEW.status_webhook_url IS NOT NULL
    AND NEW.event_count <> OLD.event_count + 1)
  EXECUTE FUNCTION tell_requester();
