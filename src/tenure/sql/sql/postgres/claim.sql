-- Takes leases on the jobs whose turn it is: one update, its attempt counted, its event in the journal.
-- Takes: queue text, count integer, lease_ms bigint, worker_id text, token_h text, look boolean
-- Takes: from_priority integer, from_seq bigint, leases_ms bigint, share integer, requester_max integer
-- Returns: on the first row the time, whether the queue is paused, whether something is overdue (then
--   nothing is taken), when the next waiting job is due and whether jobs may have been left to others
--   of their requester; on each further row a lease
-- Clauses: I-7 I-8 I-9 I-12 I-36
WITH clock AS MATERIALIZED (
  SELECT {now} AS now_ms, queue_is_paused(:queue) AS paused
),
chores AS MATERIALIZED (
  SELECT c.now_ms, c.paused, :look AND (
    EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status IN {running}
      AND lease_expires_at >= :leases_ms AND lease_expires_at < c.now_ms)
    OR EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status = 'queued' AND NOT ready
      AND due_ms > 0 AND due_ms <= c.now_ms)
    OR EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status = 'queued' AND expires_ms > 0
      AND expires_ms <= c.now_ms)
  ) AS overdue,
  CASE WHEN :look THEN (SELECT min(due_ms) FROM {jobs} WHERE queue = :queue AND status = 'queued'
    AND NOT ready AND due_ms > 0) END AS next_due_ms
  FROM clock c
),
urgent AS MATERIALIZED (
  SELECT j.ctid AS place FROM {jobs} j
  WHERE j.queue = :queue AND j.ready AND j.priority < :from_priority AND {in_turn}
  ORDER BY j.priority, j.seq
  LIMIT (SELECT CASE WHEN paused OR overdue THEN 0 ELSE :count END FROM chores)
  FOR UPDATE SKIP LOCKED
),
next AS MATERIALIZED (
  SELECT j.ctid AS place FROM {jobs} j
  WHERE j.queue = :queue AND j.ready AND (j.priority, j.seq) > (:from_priority, :from_seq)
    AND {in_turn}
  ORDER BY j.priority, j.seq
  LIMIT (SELECT CASE WHEN paused OR overdue THEN 0 ELSE :count - (SELECT count(*) FROM urgent) END
    FROM chores)
  FOR UPDATE SKIP LOCKED
),
taken AS (
  UPDATE {jobs} j
  SET status = 'claimed', passed = '', ready = false, due_ms = 0, worker_id = :worker_id,
    lease_token_h = :token_h, claimed_ms = c.now_ms, heartbeat_at = c.now_ms,
    lease_expires_at = c.now_ms + :lease_ms, claim_version = j.claim_version + 1,
    attempt_count = j.attempt_count + 1, ver = j.ver + 1, updated_ms = c.now_ms{count_event}
  FROM (SELECT place FROM urgent UNION ALL SELECT place FROM next) p, clock c
  WHERE j.ctid = p.place
  RETURNING j.job_id, j.task, j.payload, j.attempt_count, j.max_attempts, j.claim_version,
    j.lease_expires_at, j.created_ms, j.gid, j.priority, j.trace, j.seq, j.ver, j.updated_ms,
    j.requester_id, j.status_webhook_url, j.credential_version, j.status, 'queued' AS was{event_columns}
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, token_h, worker_id, lease_until_ms, gid, priority, max_attempts, told, listed)
  SELECT :queue, job_id, ver, 'claim', updated_ms, task, 'queued', 'claimed', attempt_count,
    claim_version, claim_version - 1, :token_h, :worker_id, lease_expires_at, gid, priority,
    max_attempts, {told}, ver > 2
  FROM taken
){tell_taken}
SELECT now_ms, paused, overdue, coalesce(next_due_ms, 0) AS next_due_ms,
  (:share > 0 OR :requester_max > 0) AND EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND ready)
    AS left_some, NULL AS job_id, NULL AS task,
  NULL AS payload, NULL AS attempt_count, NULL AS max_attempts, NULL AS claim_version,
  NULL AS lease_expires_at, NULL AS created_ms, NULL AS gid, NULL AS priority, NULL AS trace,
  NULL AS seq, NULL AS requester_id, NULL AS status_webhook_url, NULL AS credential_version
FROM chores
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, job_id, task, payload, attempt_count, max_attempts, claim_version,
  lease_expires_at, created_ms, gid, priority, trace, seq, requester_id, status_webhook_url,
  credential_version
FROM taken
ORDER BY priority NULLS FIRST, seq
