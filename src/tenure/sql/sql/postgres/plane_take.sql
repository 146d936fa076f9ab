-- Takes leases on the jobs that messages name, if they still wait for these very messages.
-- Batch: job_id text, enqueue_id bigint
-- Takes: queue text, lease_ms bigint, worker_id text, token_h text
-- Returns: the time, whether the stream is paused (then nothing is taken), and for each job taken its
--   number and its lease (one row without a lease if none)
-- Clauses: P-5 P-7 P-8
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms, queue_is_paused(:queue) AS paused),
asked AS MATERIALIZED (
  SELECT given.job_id, given.enqueue_id, min(given.n) AS n FROM clock, {batch}
  WHERE NOT clock.paused GROUP BY given.job_id, given.enqueue_id
),
next AS MATERIALIZED (
  SELECT j.job_id, a.n FROM asked a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.queue = :queue AND (j.ready) IS TRUE AND j.claim_version = a.enqueue_id
  ORDER BY j.job_id
  FOR UPDATE OF j
),
taken AS (
  UPDATE {jobs} j
  SET status = 'claimed', passed = '', ready = false, due_ms = 0, worker_id = :worker_id,
    lease_token_h = :token_h, claimed_ms = c.now_ms, heartbeat_at = c.now_ms,
    lease_expires_at = c.now_ms + :lease_ms, claim_version = j.claim_version + 1,
    attempt_count = j.attempt_count + 1, ver = j.ver + 1, updated_ms = c.now_ms
  FROM next p, clock c
  WHERE j.job_id = p.job_id
  RETURNING p.n, j.job_id, j.task, j.payload, j.attempt_count, j.max_attempts, j.claim_version,
    j.lease_expires_at, j.created_ms, j.gid, j.priority, j.trace, j.seq, j.ver, j.updated_ms
),
forgotten AS (
  DELETE FROM plane_messages m USING taken t WHERE m.job_id = t.job_id
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, token_h, worker_id, lease_until_ms, gid, priority, max_attempts)
  SELECT :queue, job_id, ver, 'claim', updated_ms, task, 'queued', 'claimed', attempt_count,
    claim_version, claim_version - 1, :token_h, :worker_id, lease_expires_at, gid, priority,
    max_attempts
  FROM taken
),
opened AS (
  INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
    verdict, outcome_h)
  SELECT job_id, claim_version, :queue, attempt_count, :worker_id, updated_ms, 0, 'running', ''
  FROM taken{known_attempt}
)
SELECT h.now_ms, h.paused, t.n, t.job_id, t.task, t.payload, t.attempt_count, t.max_attempts,
  t.claim_version, t.lease_expires_at, t.created_ms, t.gid, t.priority, t.trace, t.seq
FROM clock h LEFT JOIN taken t ON true
ORDER BY t.n
