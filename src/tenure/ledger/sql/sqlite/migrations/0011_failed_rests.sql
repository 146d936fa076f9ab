-- A dead letter is reached from `failed` alone, by a write of its own: a job that failed rests there
-- until it is decided, and each of the two steps has its event. One write may no more go through
-- `failed`. What is cancelled or expires while it waits goes to `failed` through `claimed`.

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
      WHEN 'fetching>processing>uploading' THEN 0 WHEN 'queued>claimed>failed' THEN 0
      ELSE 1 END)
  OR (NEW.status = 'claimed' AND NEW.passed <> '')
  OR NEW.claim_version <> OLD.claim_version
    + (CASE WHEN OLD.status = 'queued' AND NEW.status = 'claimed' THEN 1 ELSE 0 END)
  OR (OLD.status = 'failed' AND NEW.status = 'queued' AND OLD.attempt_count >= OLD.max_attempts)
BEGIN
  SELECT RAISE(ABORT, 'transition: the table has no such step');
END;
-- @end
