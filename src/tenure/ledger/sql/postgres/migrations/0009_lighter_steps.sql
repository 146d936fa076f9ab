-- What a step of a job costs beside the rows it writes.
--
-- Keys that are all different are not searched for equal ones whenever a page of an index is full.
--
-- Credentials are kept with jobs of the inbox alone, so nobody looks for them elsewhere.
--
-- The rule of steps is asked after an update and not before it: what must be asked before makes the
-- server lock each row once more, and note the lock. What the rule refuses is undone with its
-- statement, as before. The event of a step that did not count itself follows it in the same way.
--
-- A condition is read anew by every statement. That of the rule names the steps that nearly all are,
-- and what is none; for every other one the table stands in the function that refuses.

-- @for box in inbox_jobs job_outbox_events plane_jobs
ALTER INDEX {box}_in_line SET (deduplicate_items = off);
ALTER INDEX {box}_not_due SET (deduplicate_items = off);

DROP TRIGGER {box}_step ON {box};
CREATE OR REPLACE FUNCTION {box}_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' THEN
    RAISE EXCEPTION 'a new job is queued, not %', NEW.status
      USING ERRCODE = 'check_violation', CONSTRAINT = 'transition';
  END IF;
  IF (OLD.status = NEW.status
      OR OLD.status || '>' || NEW.status IN ('queued>claimed', 'claimed>fetching',
        'fetching>processing', 'processing>uploading', 'uploading>succeeded', 'claimed>queued',
        'fetching>queued', 'processing>queued', 'uploading>queued', 'claimed>failed',
        'fetching>failed', 'processing>failed', 'uploading>failed', 'failed>queued',
        'failed>dead_letter')
      OR OLD.status || '>' || NEW.passed || NEW.status IN ('claimed>fetching>processing',
        'claimed>fetching>processing>uploading', 'claimed>fetching>processing>uploading>succeeded',
        'fetching>processing>uploading', 'fetching>processing>uploading>succeeded',
        'processing>uploading>succeeded', 'claimed>failed>dead_letter',
        'fetching>failed>dead_letter', 'processing>failed>dead_letter',
        'uploading>failed>dead_letter', 'queued>claimed>failed>dead_letter'))
    AND NOT (NEW.status = 'claimed' AND NEW.passed <> '')
    AND NEW.claim_version = OLD.claim_version
      + (CASE WHEN OLD.status = 'queued' AND NEW.status = 'claimed' THEN 1 ELSE 0 END)
    AND NOT (OLD.status = 'failed' AND NEW.status = 'queued'
      AND OLD.attempt_count >= OLD.max_attempts)
  THEN
    RETURN NULL;
  END IF;
  RAISE EXCEPTION 'job %: no step from % to %, claim version % to %, attempt % of %',
      OLD.job_id, OLD.status, NEW.passed || NEW.status, OLD.claim_version, NEW.claim_version,
      NEW.attempt_count, NEW.max_attempts
    USING ERRCODE = 'check_violation', CONSTRAINT = 'transition';
END $$;

CREATE TRIGGER {box}_step AFTER UPDATE OF status, passed, claim_version ON {box} FOR EACH ROW
  WHEN (NOT (
    NEW.claim_version = OLD.claim_version + 1 AND NEW.status = 'claimed'
      AND OLD.status = 'queued' AND NEW.passed = ''
    OR NEW.claim_version = OLD.claim_version AND NEW.status = 'succeeded'
      AND OLD.status = 'claimed' AND NEW.passed = 'fetching>processing>uploading>'
    OR NEW.claim_version = OLD.claim_version AND NEW.status = OLD.status AND NEW.passed = ''))
  EXECUTE FUNCTION {box}_refuse();
-- @end

DROP INDEX job_outbox_events_sealed;
DROP INDEX plane_jobs_sealed;

ALTER INDEX job_journal_of_job SET (deduplicate_items = off);
ALTER INDEX job_journal_submits SET (deduplicate_items = off);
ALTER INDEX job_journal_told SET (deduplicate_items = off);
ALTER INDEX job_outbox_events_held_back SET (deduplicate_items = off);
ALTER INDEX job_outbox_events_of_job SET (deduplicate_items = off);

DROP TRIGGER inbox_jobs_tell ON inbox_jobs;
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
      (SELECT earlier.seq FROM job_outbox_events earlier WHERE earlier.gid = NEW.job_id
        AND earlier.status NOT IN ('succeeded', 'dead_letter') LIMIT 1) IS NULL,
      NEW.updated_ms, NEW.updated_ms, NEW.status_webhook_url, NEW.trace,
      event_body(NEW.job_id, number, NEW.status, OLD.status, NEW.task, NEW.attempt_count,
        NEW.max_attempts, NEW.updated_ms, NEW.result, NEW.error, NEW.progress));
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, to_state, max_attempts, gid)
    VALUES (box, id, 1, 'submit', NEW.updated_ms, 'webhook', 'queued', 10, NEW.job_id);
  PERFORM pg_notify(current_schema() || '_jobs', box);
  RETURN NULL;
END $$;

CREATE TRIGGER inbox_jobs_tell AFTER UPDATE OF status ON inbox_jobs FOR EACH ROW
  WHEN (OLD.status <> NEW.status AND NEW.status_webhook_url IS NOT NULL
    AND NEW.event_count <> OLD.event_count + 1)
  EXECUTE FUNCTION tell_requester();
