-- Fewer entries of indexes for every job and event.
--
-- The history of one job is read from three places: its first step is told by its own row, a success by
-- the row of its attempt, whose `ver` is the number of that step, and all others by the journal rows
-- that are `listed`. Those of earlier versions are.
--
-- The steps that events tell of are found by the queue of their jobs: whoever reads the history of an
-- outbox goes through those, a part at a time.
--
-- An event's id is that of its job and its number, so the earlier events of a job are found by their
-- ids; an index by job is not needed.

ALTER TABLE job_journal ADD COLUMN listed boolean NOT NULL DEFAULT true;
DROP INDEX job_journal_of_job;
CREATE INDEX job_journal_of_job ON job_journal (job_id, ver) WITH (deduplicate_items = off) WHERE listed;

ALTER TABLE job_attempts ADD COLUMN ver bigint NOT NULL DEFAULT 0;

DROP INDEX job_outbox_events_of_job;

DROP INDEX job_journal_told;
CREATE OR REPLACE VIEW job_outbox_journal AS
SELECT seq, queue, job_id, ver, type, ts_ms, fence, prev_fence, lease_until_ms, prev_lease_until_ms,
  due_ms, attempt, max_attempts, priority, task, from_state, to_state, token_h, worker_id, gid,
  error_code, payload_h, result_h, data, news_type, news_step, news, listed
FROM job_journal
UNION ALL
SELECT seq, queue, job_id, ver, type, ts_ms, fence, prev_fence, lease_until_ms, prev_lease_until_ms,
  due_ms, attempt, max_attempts, priority, task, from_state, to_state, token_h, worker_id, gid,
  error_code, payload_h, result_h, data, news_type, news_step, news, false
FROM job_event_submits;

-- The same of one outbox. Both halves are in order and their types and collations agree, so that whoever
-- wants the first rows of it reads no more of either.
CREATE FUNCTION outbox_journal(box text) RETURNS SETOF job_outbox_journal LANGUAGE sql STABLE
BEGIN ATOMIC
  (SELECT seq, queue, job_id, ver, type, ts_ms, fence, prev_fence, lease_until_ms, prev_lease_until_ms,
    due_ms, attempt, max_attempts, priority, task, from_state, to_state, token_h, worker_id, gid,
    error_code, payload_h, result_h, data, news_type, news_step, news, listed
  FROM job_journal WHERE queue = box ORDER BY seq)
  UNION ALL
  (SELECT seq, box COLLATE "C", job_id || '.' || told, 1::bigint, 'submit', ts_ms, 0::bigint, 0::bigint,
    0::bigint, 0::bigint, 0::bigint, 0, 10, 0, 'webhook', '', 'queued', '', '',
    job_id COLLATE "default", '', '', '', '', NULL, NULL, NULL, false
  FROM job_journal WHERE queue = left(box, -7) AND told > 0 ORDER BY seq);
END;

-- The number of an event among those of its job; 0 where its id says none.
CREATE FUNCTION event_number(id text, gid text) RETURNS integer LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN left(id, length(gid) + 1) = gid || '.'
      AND substr(id, length(gid) + 2) ~ '^[1-9][0-9]{0,8}$'
    THEN substr(id, length(gid) + 2)::integer ELSE 0 END
$$;

-- What JSON would write otherwise is looked for once, in id and task together.
CREATE OR REPLACE FUNCTION event_body(job_id text, number integer, status text, was text, task text,
  attempt integer, max_attempts integer, at_ms bigint, result text, error text, progress text)
RETURNS text LANGUAGE sql STABLE AS $$
  SELECT CASE WHEN (job_id || task) COLLATE "C" ~ '[[:cntrl:]"\\]'
    THEN '{"event_id":' || left(to_json(job_id)::text, -1) || '.' || number || '","job_id":'
      || to_json(job_id)::text || ',"seq":' || number || ',"status":"' || status
      || '","previous_status":"' || was || '","task":' || to_json(task)::text
    ELSE '{"event_id":"' || job_id || '.' || number || '","job_id":"' || job_id || '","seq":' || number
      || ',"status":"' || status || '","previous_status":"' || was || '","task":"' || task || '"' END
    || ',"attempt":' || attempt || ',"max_attempts":' || max_attempts || ',"occurred_ms":' || at_ms
    || CASE WHEN status = 'succeeded' THEN ',"outputs":' || coalesce(nullif(result, ''), 'null')
      WHEN status IN ('failed', 'dead_letter') THEN ',"error":' || coalesce(nullif(error, ''), 'null')
      WHEN progress <> '' THEN ',"progress":' || progress ELSE '' END || '}'
$$;

CREATE OR REPLACE FUNCTION tell_requester() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  number integer := OLD.event_count + 1;
  id text := NEW.job_id || '.' || number;
  box text := NEW.queue || '/outbox';
BEGIN
  UPDATE inbox_jobs SET event_count = number WHERE job_id = NEW.job_id;
  INSERT INTO job_outbox_events (job_id, queue, task, gid, requester_id, max_attempts, ready,
      created_ms, updated_ms, status_webhook_url, trace, payload)
    VALUES (id, box, 'webhook', NEW.job_id, NEW.requester_id, 10,
      (SELECT earlier.seq FROM generate_series(1, number - 1) nth, job_outbox_events earlier
        WHERE earlier.job_id = NEW.job_id || '.' || nth
          AND earlier.status NOT IN ('succeeded', 'dead_letter') LIMIT 1) IS NULL,
      NEW.updated_ms, NEW.updated_ms, NEW.status_webhook_url, NEW.trace,
      event_body(NEW.job_id, number, NEW.status, OLD.status, NEW.task, NEW.attempt_count,
        NEW.max_attempts, NEW.updated_ms, NEW.result, NEW.error, NEW.progress));
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, to_state, max_attempts, gid, listed)
    VALUES (box, id, 1, 'submit', NEW.updated_ms, 'webhook', 'queued', 10, NEW.job_id, false);
  PERFORM pg_notify(current_schema() || '_jobs', box);
  RETURN NULL;
END $$;
