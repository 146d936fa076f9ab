-- Numbers within bounds: what is counted on and added to cannot overflow, whoever writes to the table. A
-- row at the end of its range would make every claim fail that meets it, and its neighbours wait. The number
-- of events never falls: the next event would have the id of an earlier one.

-- @for box in inbox_jobs job_outbox_events plane_jobs
ALTER TABLE {box} ADD CONSTRAINT numbers_within_bounds CHECK (
  attempt_count BETWEEN 0 AND 1000000000
  AND lost_count BETWEEN 0 AND 1000000000
  AND event_count BETWEEN 0 AND 1000000000
  AND ver BETWEEN 0 AND 1152921504606846976
  AND claim_version BETWEEN 0 AND 1152921504606846976
  AND due_ms BETWEEN -1152921504606846976 AND 1152921504606846976
  AND claimed_ms BETWEEN -1152921504606846976 AND 1152921504606846976
  AND heartbeat_at BETWEEN -1152921504606846976 AND 1152921504606846976
  AND lease_expires_at BETWEEN -1152921504606846976 AND 1152921504606846976
  AND created_ms BETWEEN -1152921504606846976 AND 1152921504606846976
  AND updated_ms BETWEEN -1152921504606846976 AND 1152921504606846976
  AND expires_ms BETWEEN -1152921504606846976 AND 1152921504606846976) NOT VALID;
-- @end

CREATE FUNCTION refuse_fewer_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'job %: % events cannot become %', OLD.job_id, OLD.event_count, NEW.event_count
    USING ERRCODE = 'check_violation', CONSTRAINT = 'numbers_within_bounds';
END $$;
CREATE TRIGGER inbox_jobs_fewer_events AFTER UPDATE OF event_count ON inbox_jobs FOR EACH ROW
  WHEN (NEW.event_count < OLD.event_count) EXECUTE FUNCTION refuse_fewer_events();
