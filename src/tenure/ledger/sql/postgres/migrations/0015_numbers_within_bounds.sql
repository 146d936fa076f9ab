-- Numbers within bounds: what is counted on and added to cannot overflow, whoever writes to the table. A
-- row at the end of its range would make every claim fail that meets it, and its neighbours wait. A count
-- may pass its bound by steps of one, so that a row at the bound goes on like every other, and such a row
-- may be stored anew, up to twice the bound. The number of events never falls: the next event would have
-- the id of an earlier one. What an earlier version stored beyond the bounds is brought within them, except
-- for the number of events.

-- @for box in inbox_jobs job_outbox_events plane_jobs
UPDATE {box} SET
  attempt_count = least(greatest(attempt_count, 0), 1000000000),
  lost_count = least(greatest(lost_count, 0), 1000000000),
  event_count = least(greatest(event_count, 0), 1000000000),
  ver = least(greatest(ver, 0), 1152921504606846976),
  due_ms = least(greatest(due_ms, -1152921504606846976), 1152921504606846976),
  claimed_ms = least(greatest(claimed_ms, -1152921504606846976), 1152921504606846976),
  heartbeat_at = least(greatest(heartbeat_at, -1152921504606846976), 1152921504606846976),
  lease_expires_at = least(greatest(lease_expires_at, -1152921504606846976), 1152921504606846976),
  created_ms = least(greatest(created_ms, -1152921504606846976), 1152921504606846976),
  updated_ms = least(greatest(updated_ms, -1152921504606846976), 1152921504606846976),
  expires_ms = least(greatest(expires_ms, -1152921504606846976), 1152921504606846976)
WHERE NOT (attempt_count BETWEEN 0 AND 1000000000
  AND lost_count BETWEEN 0 AND 1000000000
  AND event_count BETWEEN 0 AND 1000000000
  AND ver BETWEEN 0 AND 1152921504606846976
  AND due_ms BETWEEN -1152921504606846976 AND 1152921504606846976
  AND claimed_ms BETWEEN -1152921504606846976 AND 1152921504606846976
  AND heartbeat_at BETWEEN -1152921504606846976 AND 1152921504606846976
  AND lease_expires_at BETWEEN -1152921504606846976 AND 1152921504606846976
  AND created_ms BETWEEN -1152921504606846976 AND 1152921504606846976
  AND updated_ms BETWEEN -1152921504606846976 AND 1152921504606846976
  AND expires_ms BETWEEN -1152921504606846976 AND 1152921504606846976);

ALTER TABLE {box} ADD CONSTRAINT numbers_within_bounds CHECK (
  attempt_count >= 0 AND lost_count >= 0 AND event_count >= 0 AND ver >= 0
  AND due_ms BETWEEN -1152921504606846976 AND 1152921504606846976
  AND claimed_ms BETWEEN -1152921504606846976 AND 1152921504606846976
  AND heartbeat_at BETWEEN -1152921504606846976 AND 1152921504606846976
  AND lease_expires_at BETWEEN -1152921504606846976 AND 1152921504606846976
  AND created_ms BETWEEN -1152921504606846976 AND 1152921504606846976
  AND updated_ms BETWEEN -1152921504606846976 AND 1152921504606846976
  AND expires_ms BETWEEN -1152921504606846976 AND 1152921504606846976) NOT VALID;
-- @end

CREATE FUNCTION refuse_numbers() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'job %: a count is beyond its bound, or the number of events falls', NEW.job_id
    USING ERRCODE = 'check_violation', CONSTRAINT = 'numbers_within_bounds';
END $$;

-- @for box in inbox_jobs job_outbox_events plane_jobs
CREATE TRIGGER {box}_bounds_begin BEFORE INSERT ON {box} FOR EACH ROW
  WHEN (NEW.attempt_count > 2000000000 OR NEW.lost_count > 2000000000 OR NEW.event_count > 200000
    OR NEW.ver > 2305843009213693952 OR NEW.claim_version NOT BETWEEN 0 AND 2305843009213693952)
  EXECUTE FUNCTION refuse_numbers();
CREATE TRIGGER {box}_bounds_step AFTER UPDATE OF attempt_count, lost_count, event_count, ver ON {box}
  FOR EACH ROW WHEN (NEW.event_count < OLD.event_count
    OR NEW.attempt_count > 1000000000 AND NEW.attempt_count - 1 > OLD.attempt_count
    OR NEW.lost_count > 1000000000 AND NEW.lost_count - 1 > OLD.lost_count
    OR NEW.event_count > 100000 AND NEW.event_count - 1 > OLD.event_count
    OR NEW.ver > 1152921504606846976 AND NEW.ver - 1 > OLD.ver)
  EXECUTE FUNCTION refuse_numbers();
-- @end

-- An event is looked for among the last thousand of its job: each of those waited for the ones before it.
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
      (SELECT earlier.seq
        FROM generate_series(greatest(1, number - 1000), number - 1) nth, job_outbox_events earlier
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
