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
DELETE FROM temp.head;
INSERT INTO temp.head
SELECT :now_ms, coalesce((SELECT paused FROM job_queues WHERE queue = :queue), 0),
  :check_due AND (
    EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND lease_expires_at > 0
      AND lease_expires_at < :now_ms AND status IN {running})
    OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND due_ms > 0 AND due_ms <= :now_ms
      AND status = 'queued' AND NOT ready)
    OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND expires_ms > 0
      AND expires_ms <= :now_ms AND status = 'queued')),
  CASE WHEN :check_due THEN (SELECT due_ms FROM {jobs} WHERE queue = :queue AND due_ms > 0
    AND status = 'queued' AND NOT ready ORDER BY due_ms LIMIT 1) END;
DELETE FROM temp.weighed;
INSERT INTO temp.weighed (turn, job_id)
SELECT row_number() OVER (ORDER BY priority, seq), job_id FROM (
  SELECT j.job_id, j.priority, j.seq FROM {jobs} j
  WHERE j.queue = :queue AND j.ready AND j.status = 'queued'
    AND NOT EXISTS (SELECT 1 FROM temp.head WHERE paused OR overdue)
  ORDER BY j.priority, j.seq LIMIT (SELECT sum(a.count) FROM {batch} a));
UPDATE temp.weighed SET n = (
  SELECT s.n FROM (SELECT a.n, sum(a.count) OVER (ORDER BY a.n) AS upto FROM {batch} a) s
  WHERE s.upto >= temp.weighed.turn ORDER BY s.upto, s.n LIMIT 1);
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id, n) {fitting} SELECT job_id, n FROM fitting WHERE turn > 0;
UPDATE {jobs} AS j
SET status = 'claimed', passed = '', ready = 0, due_ms = 0, worker_id = a.worker_id,
  lease_token_h = a.token_h, claimed_ms = :now_ms, heartbeat_at = :now_ms,
  lease_expires_at = :now_ms + :lease_ms, claim_version = j.claim_version + 1,
  attempt_count = j.attempt_count + 1, ver = j.ver + 1, updated_ms = :now_ms
FROM temp.chosen c JOIN {batch} a ON a.n = c.n
WHERE j.job_id = c.job_id;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, lease_until_ms, gid, priority, max_attempts)
SELECT :queue, j.job_id, j.ver, 'claim', :now_ms, j.task, 'queued', 'claimed', j.attempt_count,
  j.claim_version, j.claim_version - 1, j.lease_token_h, j.worker_id, j.lease_expires_at, j.gid,
  j.priority, j.max_attempts
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id ORDER BY j.priority, j.seq;
INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
  verdict, outcome_h)
SELECT j.job_id, j.claim_version, :queue, j.attempt_count, j.worker_id, :now_ms, 0, 'running', ''
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id {known_attempt};
SELECT h.now_ms, h.paused, h.overdue, coalesce(h.next_due_ms, 0) AS next_due_ms, t.n, t.job_id,
  t.task, t.payload, t.attempt_count, t.max_attempts, t.claim_version, t.lease_expires_at,
  t.created_ms, t.expires_ms, t.gid, t.priority, t.trace, t.seq
FROM temp.head h
LEFT JOIN (SELECT c.n, j.* FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id) t
ORDER BY t.priority, t.seq;

-- name: plane_take
-- Takes leases on the jobs that messages name, if the messages are still current, up to the job with which
-- the payloads reach `bytes` bytes.
-- Batch: job_id text, enqueue_id bigint
-- Takes: queue text, lease_ms bigint, worker_id text, token_h text, bytes bigint
-- Returns: the time, whether the stream is paused (then nothing is taken), and for each current message its
--   number and the lease, without a lease if the job was left (one row without a number if there is none)
-- `mark` says that the job is taken.
-- Clauses: P-5 P-7 P-8
DELETE FROM temp.chosen;
INSERT OR IGNORE INTO temp.chosen (job_id, n)
SELECT j.job_id, a.n FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.queue = :queue AND j.ready AND j.status = 'queued' AND j.claim_version = a.enqueue_id
  AND NOT coalesce((SELECT paused FROM job_queues WHERE queue = :queue), 0)
ORDER BY a.n;
DELETE FROM temp.weighed;
INSERT INTO temp.weighed (turn, job_id, n)
SELECT row_number() OVER (ORDER BY n), job_id, 1 FROM temp.chosen;
UPDATE temp.chosen SET mark = 1 WHERE job_id IN ({fitting} SELECT job_id FROM fitting);
UPDATE {jobs}
SET status = 'claimed', passed = '', ready = 0, due_ms = 0, worker_id = :worker_id,
  lease_token_h = :token_h, claimed_ms = :now_ms, heartbeat_at = :now_ms,
  lease_expires_at = :now_ms + :lease_ms, claim_version = claim_version + 1,
  attempt_count = attempt_count + 1, ver = ver + 1, updated_ms = :now_ms
WHERE job_id IN (SELECT job_id FROM temp.chosen WHERE mark);
DELETE FROM plane_messages WHERE job_id IN (SELECT job_id FROM temp.chosen WHERE mark);
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, lease_until_ms, gid, priority, max_attempts)
SELECT :queue, j.job_id, j.ver, 'claim', :now_ms, j.task, 'queued', 'claimed', j.attempt_count,
  j.claim_version, j.claim_version - 1, :token_h, :worker_id, j.lease_expires_at, j.gid, j.priority,
  j.max_attempts
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id WHERE c.mark ORDER BY c.n;
INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
  verdict, outcome_h)
SELECT j.job_id, j.claim_version, :queue, j.attempt_count, j.worker_id, :now_ms, 0, 'running', ''
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id AND c.mark {known_attempt};
SELECT :now_ms AS now_ms, coalesce(p.paused, 0) AS paused, t.*
FROM (SELECT (SELECT paused FROM job_queues WHERE queue = :queue) AS paused) p
LEFT JOIN (SELECT c.n, j.job_id, j.task, j.payload, j.attempt_count, j.max_attempts,
    j.claim_version, j.lease_expires_at, j.created_ms, j.expires_ms, j.gid, j.priority, j.trace, j.seq
  FROM temp.chosen c LEFT JOIN {jobs} j ON j.job_id = c.job_id AND c.mark) t
ORDER BY t.n;

-- name: plane_current
-- Which messages are current: their job waits for them, or runs because of them.
-- Batch: job_id text, enqueue_id bigint
-- Takes: queue text
-- Returns: the number of each such message, and whether its job still waits
-- Clauses: P-5
SELECT a.n, (j.claim_version = a.enqueue_id) AS waits
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.queue = :queue AND ((j.ready AND j.claim_version = a.enqueue_id)
  OR (j.lease_expires_at > 0 AND j.claim_version = a.enqueue_id + 1));

-- name: plane_send
-- Marks messages as sent, oldest first. The plane that marked a message sends it.
-- Takes: queue text, count integer, redis_ms bigint
-- Returns: the messages to send, and whether their jobs have been claimed before
-- Clauses: P-3
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id)
SELECT job_id FROM plane_messages WHERE queue = :queue AND sent_ms = 0 ORDER BY seq LIMIT :count;
UPDATE plane_messages SET sent_ms = :now_ms, sent_redis_ms = :redis_ms
WHERE job_id IN (SELECT job_id FROM temp.chosen);
SELECT m.job_id, m.enqueue_id, m.enqueue_id > 0 AS again
FROM temp.chosen c JOIN plane_messages m ON m.job_id = c.job_id ORDER BY m.seq;

-- name: plane_unsend
-- Unmarks messages that could not be sent.
-- Batch: job_id text, enqueue_id bigint
-- Returns: how many
-- Clauses: P-3
UPDATE plane_messages SET sent_ms = 0
WHERE EXISTS (SELECT 1 FROM {batch} a
  WHERE a.job_id = plane_messages.job_id AND a.enqueue_id = plane_messages.enqueue_id);
SELECT changes() AS unsent;

-- name: plane_leases
-- The latest leases of jobs, and whose jobs they are.
-- Batch: job_id text
-- Returns: for each job that exists its queue, its requester, its claim version and when its lease
-- expires (0: ended)
-- Clauses: P-11 P-16
SELECT j.job_id, j.queue, j.requester_id, j.claim_version, j.lease_expires_at
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id;

-- name: plane_relay
-- Registers a stream whose messages travel through Redis, and makes messages for jobs that have none.
-- Takes: queue text
-- Returns: how many jobs were without one
-- Clauses: P-3 P-4
INSERT OR IGNORE INTO plane_streams (queue) VALUES (:queue);
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id)
SELECT j.job_id FROM {jobs} j WHERE j.queue = :queue AND j.ready
  AND NOT EXISTS (SELECT 1 FROM plane_messages m WHERE m.job_id = j.job_id);
INSERT INTO plane_messages (job_id, queue, enqueue_id, seq)
SELECT j.job_id, j.queue, j.claim_version, j.seq
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id;
SELECT count(*) AS made FROM temp.chosen;

-- name: plane_sweep
-- Deletes messages of jobs that do not wait any more, and marks messages that Redis must have lost for
-- sending: those sent more than `resend_ms` ago, if Redis has no undelivered message (`empty`) or delivered
-- much later ones.
-- Takes: queue text, resend_ms bigint, empty boolean, delivered_redis_ms bigint, count integer
-- Returns: how many messages are sent again
-- Clauses: P-4
DELETE FROM plane_messages WHERE job_id IN (
  SELECT m.job_id FROM plane_messages m
  WHERE m.queue = :queue AND m.sent_ms > 0 AND m.sent_ms < :now_ms - :resend_ms
    AND NOT EXISTS (SELECT 1 FROM {jobs} j WHERE j.job_id = m.job_id AND j.ready
      AND j.claim_version = m.enqueue_id)
  LIMIT :count);
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id)
SELECT job_id FROM plane_messages WHERE queue = :queue AND sent_ms > 0
  AND sent_ms < :now_ms - :resend_ms
  AND (:empty OR sent_redis_ms < :delivered_redis_ms - :resend_ms)
ORDER BY sent_ms LIMIT :count;
UPDATE plane_messages SET sent_ms = 0 WHERE job_id IN (SELECT job_id FROM temp.chosen);
SELECT count(*) AS again FROM temp.chosen;

-- name: plane_secret
-- The secret with which the plane's lease tokens are signed; the first plane chooses it.
-- Takes: fresh text
-- Returns: the secret
-- Clauses: P-6
INSERT OR IGNORE INTO plane_secrets (id, secret) VALUES (1, :fresh);
SELECT secret FROM plane_secrets WHERE id = 1;
