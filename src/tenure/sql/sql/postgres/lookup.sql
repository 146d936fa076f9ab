-- Which stored job a job id, or an idempotency key of a requester, already stands for.
-- Batch: job_id text, requester_id text, idempotency_key text
-- Takes: queue text
-- Returns: for each that is known its number, the job's id, the hash of the request that made it, and
--   the answer that was kept with the key
-- Clauses: I-2 I-3
SELECT a.n, coalesce(j.job_id, k.job_id) AS job_id, coalesce(j.request_hash, k.request_hash) AS request_hash,
  j.job_id IS NOT NULL AS by_id, k.response
FROM (SELECT * FROM {batch}) a
LEFT JOIN LATERAL (SELECT job_id, request_hash FROM {jobs} WHERE job_id = a.job_id LIMIT 1) j ON true
LEFT JOIN LATERAL (SELECT job_id, request_hash, response FROM idempotency_keys WHERE queue = :queue
  AND requester_id = a.requester_id AND idempotency_key = a.idempotency_key LIMIT 1) k
  ON j.job_id IS NULL AND a.idempotency_key <> ''
WHERE j.job_id IS NOT NULL OR k.job_id IS NOT NULL
