-- Puts newer credentials in place for the requester of an unfinished job.
-- Takes: job_id text, requester_id text, seen_version integer, encrypted bytea
-- Takes: dek_wrapped bytea, kek_id text, encryption_version integer
-- Returns: whether the version was still the one that was seen
-- Clauses: I-42
WITH changed AS (
UPDATE {jobs}
SET storage_creds_encrypted = :encrypted, storage_creds_dek_wrapped = :dek_wrapped,
  storage_creds_kek_id = :kek_id, storage_creds_encryption_version = :encryption_version,
  credential_version = credential_version + 1
WHERE job_id = :job_id AND requester_id = :requester_id AND credential_version = :seen_version
  AND status NOT IN ('succeeded', 'dead_letter')
RETURNING 1)
SELECT count(*) AS changed FROM changed
