-- Keeps leases: all of them with `always`, else those of which less than two thirds are left.
-- Batch: job_id text, fence bigint, token_h text
-- Takes: queue text, lease_ms bigint, always boolean
-- Returns: for each lease that is still held its number, its end, the time, and whether to cancel
-- Clauses: I-11 I-14 P-11
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
asked AS MATERIALIZED (SELECT * FROM {batch}),
short AS MATERIALIZED (
  SELECT j.job_id, j.lease_expires_at AS was
  FROM asked a, {jobs} j, clock c
  WHERE j.job_id = a.job_id AND j.claim_version = a.fence AND j.lease_token_h = a.token_h
    AND (j.status IN {running}) IS TRUE
    AND (:always OR 3 * (j.lease_expires_at - c.now_ms) < 2 * :lease_ms)
  ORDER BY j.job_id
  FOR UPDATE OF j
),
kept AS (
  UPDATE {jobs} j
  SET lease_expires_at = greatest(c.now_ms + :lease_ms, s.was), heartbeat_at = c.now_ms,
    ver = j.ver + 1, updated_ms = c.now_ms
  FROM short s, clock c
  WHERE j.job_id = s.job_id
  RETURNING j.job_id, j.lease_expires_at, s.was, j.ver, j.task, j.status, j.attempt_count,
    j.max_attempts, j.claim_version, j.lease_token_h, j.worker_id, j.gid, j.priority, j.updated_ms
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, token_h, worker_id, lease_until_ms, prev_lease_until_ms, gid, priority,
    max_attempts)
  SELECT :queue, job_id, ver, 'extend', updated_ms, task, status, status, attempt_count,
    claim_version, claim_version, lease_token_h, worker_id, lease_expires_at, was, gid, priority,
    max_attempts
  FROM kept
)
SELECT a.n, c.now_ms, j.cancel_requested,
  CASE WHEN a.job_id IN (SELECT job_id FROM kept)
    THEN greatest(c.now_ms + :lease_ms, j.lease_expires_at) ELSE j.lease_expires_at
    END AS lease_expires_at
FROM clock c, asked a
JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND (j.status IN {running}) IS TRUE
