-- The sealed credentials of a job, for whoever holds its lease.
-- Takes: job_id text, fence bigint, token_h text
-- Returns: one row while the lease is held
-- Clauses: I-42
SELECT requester_id, credential_version, storage_creds_encrypted, storage_creds_dek_wrapped,
  storage_creds_kek_id, storage_creds_encryption_version, refresh_url, credential_refresh_count
FROM {jobs}
WHERE job_id = :job_id AND claim_version = :fence AND lease_token_h = :token_h AND lease_expires_at > 0
