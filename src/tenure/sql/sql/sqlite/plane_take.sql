-- Takes leases on the jobs that messages name, if they still wait for these very messages.
-- Batch: job_id text, enqueue_id bigint
-- Takes: queue text, lease_ms bigint, worker_id text, token_h text
-- Returns: the time, whether the stream is paused (then nothing is taken), and for each job taken its
--   number and its lease (one row without a lease if none)
-- Clauses: P-5 P-7 P-8
DELETE FROM temp.chosen;
INSERT OR IGNORE INTO temp.chosen (job_id, n)
SELECT j.job_id, a.n FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.queue = :queue AND j.ready AND j.status = 'queued' AND j.claim_version = a.enqueue_id
  AND NOT coalesce((SELECT paused FROM job_queues WHERE queue = :queue), 0)
ORDER BY a.n;
UPDATE {jobs}
SET status = 'claimed', passed = '', ready = 0, due_ms = 0, worker_id = :worker_id,
  lease_token_h = :token_h, claimed_ms = :now_ms, heartbeat_at = :now_ms,
  lease_expires_at = :now_ms + :lease_ms, claim_version = claim_version + 1,
  attempt_count = attempt_count + 1, ver = ver + 1, updated_ms = :now_ms
WHERE job_id IN (SELECT job_id FROM temp.chosen);
DELETE FROM plane_messages WHERE job_id IN (SELECT job_id FROM temp.chosen);
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, lease_until_ms, gid, priority, max_attempts)
SELECT :queue, j.job_id, j.ver, 'claim', :now_ms, j.task, 'queued', 'claimed', j.attempt_count,
  j.claim_version, j.claim_version - 1, :token_h, :worker_id, j.lease_expires_at, j.gid, j.priority,
  j.max_attempts
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id ORDER BY c.n;
INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
  verdict, outcome_h)
SELECT j.job_id, j.claim_version, :queue, j.attempt_count, j.worker_id, :now_ms, 0, 'running', ''
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id{known_attempt};
SELECT :now_ms AS now_ms, coalesce(p.paused, 0) AS paused, t.*
FROM (SELECT (SELECT paused FROM job_queues WHERE queue = :queue) AS paused) p
LEFT JOIN (SELECT c.n, j.job_id, j.task, j.payload, j.attempt_count, j.max_attempts,
    j.claim_version, j.lease_expires_at, j.created_ms, j.gid, j.priority, j.trace, j.seq
  FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id) t
ORDER BY t.n;
