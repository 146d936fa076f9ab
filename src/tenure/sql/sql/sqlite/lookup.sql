-- Which stored job a job id, or an idempotency key of a requester, already stands for.
-- Batch: job_id text, requester_id text, idempotency_key text
-- Takes: queue text
-- Returns: for each that is known its number, the job's id, the hash of the request that made it, and
--   the answer that was kept with the key
-- Clauses: I-2 I-3
SELECT a.n, coalesce(j.job_id, k.job_id) AS job_id,
  coalesce(j.request_hash, k.request_hash) AS request_hash, j.job_id IS NOT NULL AS by_id, k.response
FROM {batch} a
LEFT JOIN {jobs} j ON j.job_id = a.job_id
LEFT JOIN idempotency_keys k ON j.job_id IS NULL AND a.idempotency_key <> '' AND k.queue = :queue
  AND k.requester_id = a.requester_id AND k.idempotency_key = a.idempotency_key
WHERE j.job_id IS NOT NULL OR k.job_id IS NOT NULL;
