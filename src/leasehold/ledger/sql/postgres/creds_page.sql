-- Wrapped keys under another key than this one, in the order of their jobs.
-- Takes: kek_id text, after text, count integer
-- Returns: their rows, without what is encrypted
-- Clauses: I-42
SELECT job_id, requester_id, credential_version, storage_creds_kek_id, storage_creds_dek_wrapped,
  storage_creds_encryption_version
FROM {jobs}
WHERE storage_creds_kek_id IS NOT NULL AND storage_creds_kek_id <> :kek_id AND job_id > :after
ORDER BY job_id LIMIT :count
