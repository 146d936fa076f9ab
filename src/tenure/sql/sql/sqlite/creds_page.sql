-- Wrapped keys under another key than this one: of jobs and of webhook secrets, in the order of names.
-- Takes: kek_id text, after text, count integer
-- Returns: their rows, without what is encrypted
-- Clauses: I-42 I-43
SELECT * FROM (
  SELECT * FROM (
    SELECT job_id, requester_id, credential_version, storage_creds_kek_id, storage_creds_dek_wrapped,
      storage_creds_encryption_version
    FROM {jobs}
    WHERE storage_creds_kek_id IS NOT NULL AND storage_creds_kek_id <> :kek_id AND job_id > :after
    ORDER BY job_id LIMIT :count) of_jobs
  UNION ALL
  SELECT * FROM (
    SELECT name, requester_id, 1, kek_id, dek_wrapped, encryption_version FROM webhook_secrets
    WHERE kek_id IS NOT NULL AND kek_id <> :kek_id AND name > :after
    ORDER BY name LIMIT :count) of_secrets
) wrapped
ORDER BY job_id LIMIT :count;
