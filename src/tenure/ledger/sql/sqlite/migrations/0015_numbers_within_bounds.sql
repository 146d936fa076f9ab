-- Numbers within bounds: what is counted on and added to cannot overflow, whoever writes to the table. A
-- row at the end of its range would make every claim fail that meets it, and its neighbours wait. A count
-- may pass its bound by steps of one, so that a row at the bound goes on like every other, and such a row
-- may be stored anew, up to twice the bound. The number of events never falls: the next event would have
-- the id of an earlier one. What an earlier version stored beyond the bounds is brought within them, except
-- for the number of events.
-- A job's id is printable ASCII: an id with bytes that are no text names no job that could be ended.

-- @for box in inbox_jobs job_outbox_events plane_jobs
UPDATE {box} SET
  attempt_count = min(max(attempt_count, 0), 1000000000),
  lost_count = min(max(lost_count, 0), 1000000000),
  event_count = min(max(event_count, 0), 1000000000),
  ver = min(max(ver, 0), 1152921504606846976),
  due_ms = min(max(due_ms, -1152921504606846976), 1152921504606846976),
  claimed_ms = min(max(claimed_ms, -1152921504606846976), 1152921504606846976),
  heartbeat_at = min(max(heartbeat_at, -1152921504606846976), 1152921504606846976),
  lease_expires_at = min(max(lease_expires_at, -1152921504606846976), 1152921504606846976),
  created_ms = min(max(created_ms, -1152921504606846976), 1152921504606846976),
  updated_ms = min(max(updated_ms, -1152921504606846976), 1152921504606846976),
  expires_ms = min(max(expires_ms, -1152921504606846976), 1152921504606846976)
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

CREATE TRIGGER {box}_bounds_begin BEFORE INSERT ON {box}
WHEN NEW.attempt_count NOT BETWEEN 0 AND 2000000000
  OR NEW.lost_count NOT BETWEEN 0 AND 2000000000
  OR NEW.event_count NOT BETWEEN 0 AND 200000
  OR NEW.ver NOT BETWEEN 0 AND 2305843009213693952
  OR NEW.claim_version NOT BETWEEN 0 AND 2305843009213693952
  OR NEW.due_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.claimed_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.heartbeat_at NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.lease_expires_at NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.created_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.updated_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.expires_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
BEGIN
  SELECT RAISE(ABORT, 'constraint: numbers_within_bounds');
END;
CREATE TRIGGER {box}_bounds_step BEFORE UPDATE OF attempt_count, lost_count, event_count, ver, due_ms, claimed_ms,
  heartbeat_at, lease_expires_at, created_ms, updated_ms, expires_ms ON {box}
WHEN NEW.event_count < OLD.event_count
  OR NEW.attempt_count < 0 OR (NEW.attempt_count > 1000000000 AND NEW.attempt_count > OLD.attempt_count + 1)
  OR NEW.lost_count < 0 OR (NEW.lost_count > 1000000000 AND NEW.lost_count > OLD.lost_count + 1)
  OR NEW.event_count < 0 OR (NEW.event_count > 100000 AND NEW.event_count > OLD.event_count + 1)
  OR NEW.ver < 0 OR (NEW.ver > 1152921504606846976 AND NEW.ver > OLD.ver + 1)
  OR NEW.due_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.claimed_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.heartbeat_at NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.lease_expires_at NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.created_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.updated_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.expires_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
BEGIN
  SELECT RAISE(ABORT, 'constraint: numbers_within_bounds');
END;
CREATE TRIGGER {box}_id_begin BEFORE INSERT ON {box}
WHEN NEW.job_id GLOB '*[^ -~]*' OR length(NEW.job_id) <> length(CAST(NEW.job_id AS BLOB))
BEGIN
  SELECT RAISE(ABORT, 'constraint: job_id_is_printable_ascii');
END;
CREATE TRIGGER {box}_id_step BEFORE UPDATE OF job_id ON {box}
WHEN NEW.job_id GLOB '*[^ -~]*' OR length(NEW.job_id) <> length(CAST(NEW.job_id AS BLOB))
BEGIN
  SELECT RAISE(ABORT, 'constraint: job_id_is_printable_ascii');
END;
-- @end
