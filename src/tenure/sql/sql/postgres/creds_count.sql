-- Counts a credential refresh of the job whose lease is held; a counter of its own.
-- Takes: job_id text, fence bigint, token_h text
-- Returns: the sum, in one row while the lease is held
-- Clauses: I-39 I-42
UPDATE {jobs} SET credential_refresh_count = credential_refresh_count + 1
WHERE job_id = :job_id AND claim_version = :fence AND lease_token_h = :token_h AND lease_expires_at > 0
RETURNING credential_refresh_count AS refreshes
