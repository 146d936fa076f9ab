-- The control plane.

-- name: plane_claim
-- Takes leases for several claims at once, in their order: each gets up to `count` leases under a token of
-- its own, up to the one with which the payloads reach `bytes` bytes.
-- Batch: worker_id text, token_h text, count integer
-- Takes: queue text, lease_ms bigint, check_due boolean, from_priority integer, from_seq bigint, bytes bigint
-- Returns: the time, whether the queue is paused, whether something is overdue (then nothing is taken),
--   when the next waiting job is due, and a lease in each row with the number of its claim (one row
--   without a lease if there is none)
-- Clauses: P-7 P-8 P-9
WITH clock AS MATERIALIZED (
  SELECT {now} AS now_ms, queue_is_paused(:queue) AS paused
),
askers AS MATERIALIZED (
  SELECT given.n, given.worker_id, given.token_h, sum(given.count) OVER (ORDER BY given.n) AS upto
  FROM {batch}
),
due_work AS MATERIALIZED (
  SELECT c.now_ms, c.paused, :check_due AND (
    EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status IN {running}
      AND lease_expires_at < c.now_ms)
    OR EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status = 'queued' AND NOT ready
      AND due_ms > 0 AND due_ms <= c.now_ms)
    OR EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status = 'queued' AND expires_ms > 0
      AND expires_ms <= c.now_ms)
  ) AS overdue,
  CASE WHEN :check_due THEN (SELECT min(due_ms) FROM {jobs} WHERE queue = :queue AND status = 'queued'
    AND NOT ready AND due_ms > 0) END AS next_due_ms,
  (SELECT max(upto) FROM askers) AS places
  FROM clock c
),
urgent AS MATERIALIZED (
  SELECT j.job_id, j.priority, j.seq, octet_length(j.payload) AS bytes FROM {jobs} j
  WHERE j.queue = :queue AND j.ready AND j.priority < :from_priority
  ORDER BY j.priority, j.seq
  LIMIT (SELECT CASE WHEN paused OR overdue THEN 0 ELSE places END FROM due_work)
  FOR UPDATE SKIP LOCKED
),
next AS MATERIALIZED (
  SELECT j.job_id, j.priority, j.seq, octet_length(j.payload) AS bytes FROM {jobs} j
  WHERE j.queue = :queue AND j.ready AND (j.priority, j.seq) > (:from_priority, :from_seq)
  ORDER BY j.priority, j.seq
  LIMIT (SELECT CASE WHEN paused OR overdue THEN 0 ELSE places - (SELECT count(*) FROM urgent) END
    FROM due_work)
  FOR UPDATE SKIP LOCKED
),
placed AS MATERIALIZED (
  SELECT p.job_id, p.bytes, row_number() OVER (ORDER BY p.priority, p.seq) AS place
  FROM (SELECT * FROM urgent UNION ALL SELECT * FROM next) p
),
dealt AS MATERIALIZED (
  SELECT p.job_id, a.n, a.worker_id, a.token_h,
    sum(p.bytes) OVER (PARTITION BY a.n ORDER BY p.place) - p.bytes AS bytes_before
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
  WHERE j.job_id = d.job_id AND d.bytes_before < :bytes
  RETURNING d.n, j.job_id, j.task, j.payload, j.attempt_count, j.max_attempts, j.claim_version,
    j.lease_expires_at, j.created_ms, j.expires_ms, j.gid, j.priority, j.trace, j.seq, j.ver, j.updated_ms,
    j.worker_id, j.lease_token_h
),
journaled AS (
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
  FROM taken {unknown_attempt}
)
SELECT h.now_ms, h.paused, h.overdue, coalesce(h.next_due_ms, 0) AS next_due_ms, t.n, t.job_id,
  t.task, t.payload, t.attempt_count, t.max_attempts, t.claim_version, t.lease_expires_at,
  t.created_ms, t.expires_ms, t.gid, t.priority, t.trace, t.seq
FROM due_work h LEFT JOIN taken t ON true
ORDER BY t.priority, t.seq

-- name: plane_take
-- Takes leases on the jobs that messages name, if the messages are still current, up to the job with which
-- the payloads reach `bytes` bytes.
-- Batch: job_id text, enqueue_id bigint
-- Takes: queue text, lease_ms bigint, worker_id text, token_h text, bytes bigint
-- Returns: the time, whether the stream is paused (then nothing is taken), and for each current message its
--   number and the lease, without a lease if the job was left (one row without a number if there is none)
-- Clauses: P-5 P-7 P-8
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms, queue_is_paused(:queue) AS paused),
requested AS MATERIALIZED (
  SELECT given.job_id, given.enqueue_id, min(given.n) AS n FROM clock, {batch}
  WHERE NOT clock.paused GROUP BY given.job_id, given.enqueue_id
),
next AS MATERIALIZED (
  SELECT j.job_id, a.n, octet_length(j.payload) AS bytes
  FROM requested a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.queue = :queue AND (j.ready) IS TRUE AND j.claim_version = a.enqueue_id
  ORDER BY j.job_id
  FOR UPDATE OF j
),
weighed AS MATERIALIZED (
  SELECT job_id, n, sum(bytes) OVER (ORDER BY n) - bytes AS bytes_before FROM next
),
taken AS (
  UPDATE {jobs} j
  SET status = 'claimed', passed = '', ready = false, due_ms = 0, worker_id = :worker_id,
    lease_token_h = :token_h, claimed_ms = c.now_ms, heartbeat_at = c.now_ms,
    lease_expires_at = c.now_ms + :lease_ms, claim_version = j.claim_version + 1,
    attempt_count = j.attempt_count + 1, ver = j.ver + 1, updated_ms = c.now_ms
  FROM weighed p, clock c
  WHERE j.job_id = p.job_id AND p.bytes_before < :bytes
  RETURNING p.n, j.job_id, j.task, j.payload, j.attempt_count, j.max_attempts, j.claim_version,
    j.lease_expires_at, j.created_ms, j.expires_ms, j.gid, j.priority, j.trace, j.seq, j.ver, j.updated_ms
),
forgotten AS (
  DELETE FROM plane_messages m USING taken t WHERE m.job_id = t.job_id
),
journaled AS (
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
  FROM taken {unknown_attempt}
)
SELECT h.now_ms, h.paused, w.n, t.job_id, t.task, t.payload, t.attempt_count, t.max_attempts,
  t.claim_version, t.lease_expires_at, t.created_ms, t.expires_ms, t.gid, t.priority, t.trace, t.seq
FROM clock h LEFT JOIN weighed w ON true LEFT JOIN taken t ON t.n = w.n
ORDER BY w.n

-- name: plane_current
-- Which messages are current: their job waits for them, or runs because of them.
-- Batch: job_id text, enqueue_id bigint
-- Takes: queue text
-- Returns: the number of each such message, and whether its job still waits
-- Clauses: P-5
SELECT a.n, (j.claim_version = a.enqueue_id) AS waits
FROM (SELECT * FROM {batch}) a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.queue = :queue AND ((j.ready AND j.claim_version = a.enqueue_id)
  OR (j.lease_expires_at > 0 AND j.claim_version = a.enqueue_id + 1))

-- name: plane_send
-- Marks messages as sent, oldest first. The plane that marked a message sends it.
-- Takes: queue text, count integer, redis_ms bigint
-- Returns: the messages to send, and whether their jobs have been claimed before
-- Clauses: P-3
WITH unsent AS MATERIALIZED (
  SELECT job_id FROM plane_messages WHERE queue = :queue AND sent_ms = 0
  ORDER BY seq LIMIT :count FOR UPDATE SKIP LOCKED
),
marked AS (
  UPDATE plane_messages m SET sent_ms = {now}, sent_redis_ms = :redis_ms
  FROM unsent u WHERE m.job_id = u.job_id
  RETURNING m.job_id, m.enqueue_id, m.enqueue_id > 0 AS again, m.seq
)
SELECT job_id, enqueue_id, again FROM marked ORDER BY seq

-- name: plane_unsend
-- Unmarks messages that could not be sent.
-- Batch: job_id text, enqueue_id bigint
-- Returns: how many
-- Clauses: P-3
WITH requested AS MATERIALIZED (SELECT * FROM {batch}),
unsent AS (
  UPDATE plane_messages m SET sent_ms = 0 FROM requested a
  WHERE m.job_id = a.job_id AND m.enqueue_id = a.enqueue_id RETURNING 1
)
SELECT count(*) AS unsent FROM unsent

-- name: plane_leases
-- The latest leases of jobs, and whose jobs they are.
-- Batch: job_id text
-- Returns: for each job that exists its queue, its requester, its claim version and when its lease
-- expires (0: ended)
-- Clauses: P-11 P-16
SELECT j.job_id, j.queue, j.requester_id, j.claim_version, j.lease_expires_at
FROM (SELECT * FROM {batch}) a JOIN {jobs} j ON j.job_id = a.job_id

-- name: plane_relay
-- Registers a stream whose messages travel through Redis, and makes messages for jobs that have none.
-- Takes: queue text
-- Returns: how many jobs were without one
-- Clauses: P-3 P-4
WITH named AS (
  INSERT INTO plane_streams (queue) VALUES (:queue) ON CONFLICT DO NOTHING
),
made AS (
  INSERT INTO plane_messages (job_id, queue, enqueue_id, seq)
  SELECT j.job_id, j.queue, j.claim_version, j.seq FROM {jobs} j
  WHERE j.queue = :queue AND j.ready
    AND NOT EXISTS (SELECT FROM plane_messages m WHERE m.job_id = j.job_id)
  ON CONFLICT DO NOTHING
  RETURNING 1
)
SELECT count(*) AS made FROM made

-- name: plane_sweep
-- Deletes messages of jobs that do not wait any more, and marks messages that Redis must have lost for
-- sending: those sent more than `resend_ms` ago, if Redis has no undelivered message (`empty`) or delivered
-- much later ones.
-- Takes: queue text, resend_ms bigint, empty boolean, delivered_redis_ms bigint, count integer
-- Returns: how many messages are sent again
-- Clauses: P-4
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
old AS MATERIALIZED (
  SELECT m.job_id, m.sent_redis_ms, EXISTS (SELECT FROM {jobs} j WHERE j.job_id = m.job_id AND j.ready
      AND j.claim_version = m.enqueue_id) AS waits
  FROM plane_messages m, clock c
  WHERE m.queue = :queue AND m.sent_ms > 0 AND m.sent_ms < c.now_ms - :resend_ms
  ORDER BY m.sent_ms LIMIT :count
  FOR UPDATE OF m SKIP LOCKED
),
gone AS (
  DELETE FROM plane_messages m USING old o WHERE m.job_id = o.job_id AND NOT o.waits
),
again AS (
  UPDATE plane_messages m SET sent_ms = 0 FROM old o
  WHERE m.job_id = o.job_id AND o.waits
    AND (:empty OR o.sent_redis_ms < :delivered_redis_ms - :resend_ms)
  RETURNING 1
)
SELECT count(*) AS again FROM again

-- name: plane_secret
-- The secret with which the plane's lease tokens are signed; the first plane chooses it.
-- Takes: fresh text
-- Returns: the secret; nothing when another plane is choosing it right now
-- Clauses: P-6
WITH made AS (
  INSERT INTO plane_secrets (id, secret) VALUES (1, :fresh) ON CONFLICT DO NOTHING RETURNING secret
)
SELECT secret FROM made UNION ALL SELECT secret FROM plane_secrets WHERE id = 1 LIMIT 1
