-- Sealed credentials go with the step that ends their job, whoever makes it, unless the queue keeps
-- them. What ended jobs still hold is removed here. The condition is false for jobs without
-- credentials, which are nearly all, so these pay nothing but its reading.

ALTER TABLE job_queues ADD COLUMN keep_credentials boolean NOT NULL DEFAULT false;

CREATE FUNCTION forget_credentials() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  UPDATE inbox_jobs SET storage_creds_encrypted = NULL, storage_creds_dek_wrapped = NULL,
    storage_creds_kek_id = NULL, storage_creds_encryption_version = NULL
  WHERE job_id = NEW.job_id AND status IN ('succeeded', 'dead_letter')
    AND NOT EXISTS (SELECT 1 FROM job_queues WHERE queue = NEW.queue AND keep_credentials);
  RETURN NULL;
END $$;

CREATE TRIGGER inbox_jobs_forget AFTER UPDATE OF status ON inbox_jobs FOR EACH ROW
  WHEN (NEW.storage_creds_kek_id IS NOT NULL AND NEW.status IN ('succeeded', 'dead_letter'))
  EXECUTE FUNCTION forget_credentials();

UPDATE inbox_jobs SET storage_creds_encrypted = NULL, storage_creds_dek_wrapped = NULL,
  storage_creds_kek_id = NULL, storage_creds_encryption_version = NULL
WHERE storage_creds_kek_id IS NOT NULL AND status IN ('succeeded', 'dead_letter');
