-- Which messages still mean something: their job waits for them, or runs because of them.
-- Batch: job_id text, enqueue_id bigint
-- Takes: queue text
-- Returns: the number of each such message, and whether its job still waits
-- Clauses: P-5
SELECT a.n, (j.claim_version = a.enqueue_id) AS waits
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.queue = :queue AND ((j.ready AND j.claim_version = a.enqueue_id)
  OR (j.lease_expires_at > 0 AND j.claim_version = a.enqueue_id + 1));
