-- Takes leases for several askers at once, in their order: each gets as many as it asked for, under
-- a token of its own, for as long as the line lasts.
-- Batch: worker_id text, token_h text, count integer
-- Takes: queue text, lease_ms bigint, look boolean, from_priority integer, from_seq bigint
-- Returns: the time, whether the queue is paused, whether something is overdue (then nothing is taken),
--   when the next waiting job is due, and a lease on each row with the number of its asker (one row
--   without a lease if none)
-- Clauses: P-7 P-8 P-9
WITH clock AS MATERIALIZED (
  SELECT {now} AS now_ms, queue_is_paused(:queue) AS paused
),
askers AS MATERIALIZED (
  SELECT given.n, given.worker_id, given.token_h, sum(given.count) OVER (ORDER BY given.n) AS upto
  FROM {batch}
),
chores AS MATERIALIZED (
  SELECT c.now_ms, c.paused, :look AND (
    EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status IN {running}
      AND lease_expires_at < c.now_ms)
    OR EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status = 'queued' AND NOT ready
      AND due_ms > 0 AND due_ms <= c.now_ms)
    OR EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status = 'queued' AND expires_ms > 0
      AND expires_ms <= c.now_ms)
  ) AS overdue,
  CASE WHEN :look THEN (SELECT min(due_ms) FROM {jobs} WHERE queue = :queue AND status = 'queued'
    AND NOT ready AND due_ms > 0) END AS next_due_ms,
  (SELECT max(upto) FROM askers) AS places
  FROM clock c
),
urgent AS MATERIALIZED (
  SELECT j.job_id, j.priority, j.seq FROM {jobs} j
  WHERE j.queue = :queue AND j.ready AND j.priority < :from_priority
  ORDER BY j.priority, j.seq
  LIMIT (SELECT CASE WHEN paused OR overdue THEN 0 ELSE places END FROM chores)
  FOR UPDATE SKIP LOCKED
),
next AS MATERIALIZED (
  SELECT j.job_id, j.priority, j.seq FROM {jobs} j
  WHERE j.queue = :queue AND j.ready AND (j.priority, j.seq) > (:from_priority, :from_seq)
  ORDER BY j.priority, j.seq
  LIMIT (SELECT CASE WHEN paused OR overdue THEN 0 ELSE places - (SELECT count(*) FROM urgent) END
    FROM chores)
  FOR UPDATE SKIP LOCKED
),
placed AS MATERIALIZED (
  SELECT p.job_id, row_number() OVER (ORDER BY p.priority, p.seq) AS place
  FROM (SELECT * FROM urgent UNION ALL SELECT * FROM next) p
),
dealt AS MATERIALIZED (
  SELECT p.job_id, a.n, a.worker_id, a.token_h
  FROM placed p CROSS JOIN LATERAL (
    SELECT n, worker_id, token_h FROM askers WHERE upto >= p.place ORDER BY upto, n LIMIT 1) a
),
taken AS (
  UPDATE {jobs} j
  SET status = 'claimed', passed = '', ready = false, due_ms = 0, worker_id = d.worker_id,
    lease_token_h = d.token_h, claimed_ms = c.now_ms, heartbeat_at = c.now_ms,
    lease_expires_at = c.now_ms + :lease_ms, claim_version = j.claim_version + 1,
    attempt_count = j.attempt_count + 1, ver = j.ver + 1, updated_ms = c.now_ms
  FROM dealt d, clock c
  WHERE j.job_id = d.job_id
  RETURNING d.n, j.job_id, j.task, j.payload, j.attempt_count, j.max_attempts, j.claim_version,
    j.lease_expires_at, j.created_ms, j.gid, j.priority, j.trace, j.seq, j.ver, j.updated_ms,
    j.worker_id, j.lease_token_h
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, token_h, worker_id, lease_until_ms, gid, priority, max_attempts)
  SELECT :queue, job_id, ver, 'claim', updated_ms, task, 'queued', 'claimed', attempt_count,
    claim_version, claim_version - 1, lease_token_h, worker_id, lease_expires_at, gid, priority,
    max_attempts
  FROM taken
),
opened AS (
  INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
    verdict, outcome_h)
  SELECT job_id, claim_version, :queue, attempt_count, worker_id, updated_ms, 0, 'running', ''
  FROM taken{known_attempt}
)
SELECT h.now_ms, h.paused, h.overdue, coalesce(h.next_due_ms, 0) AS next_due_ms, t.n, t.job_id,
  t.task, t.payload, t.attempt_count, t.max_attempts, t.claim_version, t.lease_expires_at,
  t.created_ms, t.gid, t.priority, t.trace, t.seq
FROM chores h LEFT JOIN taken t ON true
ORDER BY t.priority, t.seq
