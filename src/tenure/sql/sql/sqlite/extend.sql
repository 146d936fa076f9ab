-- Keeps leases: all of them with `always`, else those of which less than two thirds are left.
-- Batch: job_id text, fence bigint, token_h text
-- Takes: queue text, lease_ms bigint, always boolean
-- Returns: for each lease that is still held its number, its end, the time, and whether to cancel
-- Clauses: I-11 I-14 P-11
DELETE FROM temp.chosen;
INSERT OR IGNORE INTO temp.chosen (job_id, mark)
SELECT j.job_id, j.lease_expires_at
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND j.lease_expires_at > 0
  AND (:always OR 3 * (j.lease_expires_at - :now_ms) < 2 * :lease_ms);
UPDATE {jobs}
SET lease_expires_at = max(:now_ms + :lease_ms, lease_expires_at), heartbeat_at = :now_ms,
  ver = ver + 1, updated_ms = :now_ms
WHERE job_id IN (SELECT job_id FROM temp.chosen);
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, lease_until_ms, prev_lease_until_ms, gid, priority, max_attempts)
SELECT :queue, j.job_id, j.ver, 'extend', :now_ms, j.task, j.status, j.status, j.attempt_count,
  j.claim_version, j.claim_version, j.lease_token_h, j.worker_id, j.lease_expires_at, c.mark, j.gid,
  j.priority, j.max_attempts
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id;
SELECT a.n, j.lease_expires_at, :now_ms AS now_ms, j.cancel_requested
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND j.lease_expires_at > 0;
