-- Puts newer credentials in place for the holder of the lease, all columns and the version at once.
-- Takes: job_id text, fence bigint, token_h text, seen_version integer, encrypted bytea
-- Takes: dek_wrapped bytea, kek_id text, encryption_version integer
-- Returns: whether the version was still the one that was seen
-- Clauses: I-42
UPDATE {jobs}
SET storage_creds_encrypted = :encrypted, storage_creds_dek_wrapped = :dek_wrapped,
  storage_creds_kek_id = :kek_id, storage_creds_encryption_version = :encryption_version,
  credential_version = credential_version + 1
WHERE job_id = :job_id AND claim_version = :fence AND lease_token_h = :token_h AND lease_expires_at > 0
  AND credential_version = :seen_version;
SELECT changes() AS changed;
