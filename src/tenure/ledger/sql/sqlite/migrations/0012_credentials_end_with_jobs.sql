-- Sealed credentials go with the step that ends their job, whoever makes it, unless the queue keeps
-- them. What ended jobs still hold is removed here.

ALTER TABLE job_queues ADD COLUMN keep_credentials INTEGER NOT NULL DEFAULT 0;

CREATE TRIGGER inbox_jobs_forget AFTER UPDATE OF status ON inbox_jobs
WHEN NEW.storage_creds_kek_id IS NOT NULL AND NEW.status IN ('succeeded', 'dead_letter')
  AND NOT EXISTS (SELECT 1 FROM job_queues WHERE queue = NEW.queue AND keep_credentials)
BEGIN
  UPDATE inbox_jobs SET storage_creds_encrypted = NULL, storage_creds_dek_wrapped = NULL,
    storage_creds_kek_id = NULL, storage_creds_encryption_version = NULL
  WHERE seq = NEW.seq;
END;

UPDATE inbox_jobs SET storage_creds_encrypted = NULL, storage_creds_dek_wrapped = NULL,
  storage_creds_kek_id = NULL, storage_creds_encryption_version = NULL
WHERE storage_creds_kek_id IS NOT NULL AND status IN ('succeeded', 'dead_letter');
