-- The leases that a claim took whose answer was lost: found by the hashes of the tokens it had.
-- Takes: queue text, token_hs text[], count integer
-- Returns: the time and a lease on each row
-- Clauses: I-13
SELECT :now_ms AS now_ms, job_id, task, payload, attempt_count, max_attempts, claim_version,
  lease_expires_at, created_ms, gid, priority, trace, seq, requester_id, status_webhook_url,
  credential_version, lease_token_h
FROM {jobs}
WHERE queue = :queue AND lease_expires_at > 0
  AND lease_token_h IN (SELECT value FROM json_each(:token_hs))
ORDER BY priority, seq
LIMIT :count;
