-- A dead letter is reached from `failed` alone, by a write of its own: a job that failed rests there
-- until it is decided, and each of the two steps has its event. One write may no more go through
-- `failed`. What is cancelled or expires while it waits goes to `failed` through `claimed`.

-- @for box in inbox_jobs job_outbox_events plane_jobs
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
        'processing>uploading>succeeded', 'queued>claimed>failed'))
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
-- @end
