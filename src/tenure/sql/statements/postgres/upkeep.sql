-- Upkeep: changes that become due with time.

-- name: upkeep_needed
-- Whether upkeep has something to do, read without a lock.
-- Takes: queue text
-- Returns: whether a lease expired, a job is due or past its time to live; whether a job is in `failed`;
--   whether an event waits for an earlier one
-- Clauses: I-10 I-12
SELECT EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status IN {running}
    AND lease_expires_at < c.now_ms)
  OR EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status = 'queued' AND NOT ready
    AND due_ms > 0 AND due_ms <= c.now_ms)
  OR EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status = 'queued' AND expires_ms > 0
    AND expires_ms <= c.now_ms) AS overdue,
  EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status = 'failed') AS has_failed,
  {held_back} AS held_back
FROM (SELECT {now} AS now_ms) c

-- name: reap
-- Reclaims expired leases: the job keeps its turn, or fails if no attempt is left or too many leases were lost.
-- Takes: queue text, lost_max integer, count integer
-- Returns: for each reclaimed lease whether its job failed; `decide` ends it
-- Clauses: I-10 I-14
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
lapsed AS MATERIALIZED (
  SELECT j.job_id, j.status AS was, j.lease_expires_at AS lease_was, j.worker_id AS holder,
    j.claimed_ms, j.claim_version AS fence, j.cancel_requested AS cancelled,
    j.cancel_requested OR j.lost_count + 1 >= :lost_max OR j.attempt_count >= j.max_attempts AS ends
  FROM {jobs} j
  WHERE j.queue = :queue AND j.status IN {running} AND j.lease_expires_at < (SELECT now_ms FROM clock)
  ORDER BY j.lease_expires_at LIMIT :count
  FOR UPDATE SKIP LOCKED
),
reaped AS (
  UPDATE {jobs} j
  SET status = CASE WHEN l.ends THEN 'failed' ELSE 'queued' END, passed = '', ready = NOT l.ends,
    due_ms = CASE WHEN l.cancelled THEN -2 WHEN l.ends THEN -1 ELSE 0 END,
    lost_count = j.lost_count + 1, lease_expires_at = 0, lease_token_h = '',
    worker_id = CASE WHEN l.ends THEN j.worker_id ELSE '' END, cancel_requested = false,
    ver = j.ver + 1, updated_ms = c.now_ms,
    error = CASE WHEN l.cancelled THEN '{"code":"cancelled","message":"cancelled on request; the '
        || 'worker let its lease run out","retryable":false}'
      WHEN l.ends THEN '{"code":"lease_lost","message":"the lease ran out ' || j.lost_count + 1
        || ' time(s) without an outcome, at start ' || j.attempt_count || ' of ' || j.max_attempts
        || ': each worker that took the job died, hung or was cut off","retryable":false}'
      ELSE j.error END
  FROM lapsed l, clock c
  WHERE j.job_id = l.job_id AND j.claim_version = l.fence
  RETURNING j.job_id, l.was, l.lease_was, l.holder, l.claimed_ms, l.fence, l.ends, j.ver,
    j.task, j.attempt_count, j.max_attempts, j.gid, j.priority, j.updated_ms
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, worker_id, prev_lease_until_ms, gid, priority, max_attempts)
  SELECT :queue, job_id, ver, 'reap', updated_ms, task, was,
    CASE WHEN ends THEN 'failed' ELSE 'queued' END, attempt_count, fence, fence, holder, lease_was, gid,
    priority, max_attempts
  FROM reaped ORDER BY job_id
),
attempts AS (
  INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
    verdict, outcome_h, error_code)
  SELECT job_id, fence, :queue, attempt_count, holder, claimed_ms, updated_ms, 'lost', '',
    'lease_lost'
  FROM reaped {known_attempt}
)
SELECT job_id, ends FROM reaped

-- name: expire
-- Fails jobs that were not started within their time to live; `decide` ends them.
-- Takes: queue text, count integer
-- Returns: how many
-- Clauses: I-21
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
late AS MATERIALIZED (
  SELECT j.job_id, j.attempt_count = 0 AS ends FROM {jobs} j
  WHERE j.queue = :queue AND j.status = 'queued' AND j.expires_ms > 0
    AND j.expires_ms <= (SELECT now_ms FROM clock)
  ORDER BY j.expires_ms LIMIT :count
  FOR UPDATE SKIP LOCKED
),
started AS (
  UPDATE {jobs} j SET expires_ms = 0 FROM late l WHERE j.job_id = l.job_id AND NOT l.ends
),
ended AS (
  UPDATE {jobs} j
  SET status = 'failed', passed = 'claimed>', ready = false, due_ms = -3,
    ver = j.ver + 1, updated_ms = c.now_ms,
    error = '{"code":"expired","message":"not started within its time to live","retryable":false}'
  FROM late l, clock c
  WHERE j.job_id = l.job_id AND l.ends
  RETURNING j.job_id, j.ver, j.task, j.attempt_count, j.claim_version, j.gid, j.priority,
    j.max_attempts, j.updated_ms
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, gid, priority, max_attempts, error_code)
  SELECT :queue, job_id, ver, 'fail', updated_ms, task, 'queued', 'failed', attempt_count,
    claim_version, claim_version, gid, priority, max_attempts, 'expired'
  FROM ended
)
SELECT count(*) AS expired FROM ended

-- name: promote
-- Makes delayed jobs claimable that are due.
-- Takes: queue text, count integer, channel text
-- Returns: how many
-- Clauses: I-19 I-22
WITH due AS MATERIALIZED (
  SELECT job_id FROM {jobs}
  WHERE queue = :queue AND status = 'queued' AND NOT ready AND due_ms > 0 AND due_ms <= {now}
  ORDER BY due_ms LIMIT :count
  FOR UPDATE SKIP LOCKED
),
promoted AS (
  UPDATE {jobs} j SET ready = true FROM due d WHERE j.job_id = d.job_id AND j.status = 'queued'
  RETURNING j.job_id
),
notified AS MATERIALIZED (SELECT pg_notify(:channel, :queue) FROM (SELECT 1 FROM promoted LIMIT 1) one)
SELECT count(*) AS promoted FROM promoted LEFT JOIN notified ON true

-- name: failed_jobs
-- The jobs in `failed`, which wait for `decide`.
-- Takes: queue text, count integer
-- Returns: their ids
-- Clauses: I-6
SELECT job_id FROM {jobs} WHERE queue = :queue AND status = 'failed' LIMIT :count

-- name: unblock
-- Makes events claimable that were committed after the event before them had ended.
-- Takes: queue text, after bigint, count integer
-- Returns: how many, and the last number that was checked (0 if there are no later ones)
-- Clauses: I-22
WITH window_ AS MATERIALIZED (
  SELECT j.job_id, j.seq FROM {jobs} j
  WHERE j.queue = :queue AND j.status = 'queued' AND NOT j.ready AND j.due_ms = 0 AND j.seq > :after
  ORDER BY j.seq LIMIT :count
),
free AS MATERIALIZED (
  SELECT j.job_id FROM window_ w JOIN {jobs} j ON j.job_id = w.job_id
  WHERE (j.status = 'queued') IS TRUE AND NOT j.ready
    AND {in_turn}
  FOR UPDATE OF j SKIP LOCKED
),
freed AS (
  UPDATE {jobs} j SET ready = true FROM free f WHERE j.job_id = f.job_id AND j.status = 'queued'
  RETURNING j.job_id
)
SELECT (SELECT count(*) FROM freed) AS freed,
  CASE WHEN count(*) < :count THEN 0 ELSE max(seq) END AS last
FROM window_

-- name: prune
-- Removes jobs that ended long ago, with their attempts and keys, and leaves a tombstone for each.
-- Takes: queue text, keep_ms bigint, after bigint, count integer
-- Returns: how many, and the last position that was checked (0 if all later jobs are too young)
-- COLLATE "default" lets the index of keys by job be used, which has the collation of the database.
-- Clauses: I-23 I-34
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
window_ AS MATERIALIZED (
  SELECT job_id, seq, ts_ms AS created_ms FROM (
    SELECT * FROM (
      SELECT job_id, seq, ts_ms FROM job_journal
      WHERE queue = :queue AND type = 'submit' AND seq > :after AND seq <= :after + {span}
      ORDER BY seq LIMIT :count) own
    UNION ALL
    SELECT * FROM (
      SELECT job_id || '.' || event_number, seq, ts_ms FROM job_journal
      WHERE queue = {inbox_queue} AND event_number > 0 AND seq > :after AND seq <= :after + {span}
      ORDER BY seq LIMIT :count) steps
  ) pages ORDER BY seq LIMIT :count
),
old AS MATERIALIZED (
  SELECT j.job_id FROM window_ w JOIN {jobs} j ON j.job_id = w.job_id, clock c
  WHERE j.status IN ('succeeded', 'dead_letter') AND j.updated_ms < c.now_ms - :keep_ms
    AND (j.event_count = 0 OR (SELECT e.seq
      FROM generate_series(greatest(1, j.event_count - 1000), j.event_count) nth, job_outbox_events e
      WHERE e.job_id = j.job_id || '.' || nth
        AND (e.status NOT IN ('succeeded', 'dead_letter')) IS TRUE LIMIT 1) IS NULL)
  FOR UPDATE OF j SKIP LOCKED
),
gone AS (
  DELETE FROM {jobs} j USING old o WHERE j.job_id = o.job_id
  RETURNING j.job_id, j.ver, j.task, j.status, j.attempt_count, j.claim_version, j.requester_id
),
attempts AS (
  DELETE FROM job_attempts t USING gone g WHERE t.job_id = g.job_id AND t.queue = :queue
),
keys AS (
  DELETE FROM idempotency_keys k USING gone g
  WHERE k.job_id = g.job_id COLLATE "default" AND k.queue || '' = :queue
),
tombs AS (
  INSERT INTO pruned_jobs (job_id, queue, requester_id, pruned_ms)
  SELECT g.job_id, :queue, g.requester_id, c.now_ms FROM gone g, clock c
  ON CONFLICT (job_id, queue) DO NOTHING
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, attempt, fence,
    prev_fence, data)
  SELECT :queue, g.job_id, g.ver + 1, 'remove', c.now_ms, g.task, g.status, g.attempt_count,
    g.claim_version, g.claim_version, 'kept long enough'
  FROM gone g, clock c
)
SELECT (SELECT count(*) FROM gone) AS pruned,
  CASE WHEN max(w.created_ms) > (SELECT now_ms FROM clock) - :keep_ms THEN 0
    WHEN count(*) >= :count THEN max(w.seq)
    WHEN :after + {span} < (SELECT last_value FROM job_journal_seq_seq) THEN :after + {span}
    ELSE 0 END AS last
FROM window_ w

-- name: trim
-- Removes expired idempotency keys of ended jobs, old tombstones and tickets, and workers without a recent
-- heartbeat.
-- Takes: queue text, tombstone_ms bigint
-- Returns: nothing
-- Clauses: I-3 I-24
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
keys AS (
  DELETE FROM idempotency_keys k USING clock c
  WHERE k.queue || '' = :queue AND k.expires_ms <= c.now_ms
    AND (SELECT j.seq FROM {jobs} j WHERE j.job_id = k.job_id COLLATE "C"
      AND j.status NOT IN ('succeeded', 'dead_letter') LIMIT 1) IS NULL
),
tombs AS (DELETE FROM pruned_jobs p USING clock c WHERE p.pruned_ms < c.now_ms - :tombstone_ms),
tickets AS (DELETE FROM api_tickets t USING clock c WHERE t.expires_ms < c.now_ms),
workers AS (DELETE FROM job_workers w USING clock c
  WHERE w.queue = :queue AND w.seen_ms < c.now_ms - 3600000)
SELECT 1 FROM clock

-- name: trim_journal
-- Removes the oldest journal rows, except the submits of jobs and events that still exist, which list them,
-- and rows that a reader has not captured, unless they are older than `unread_ms`.
-- Takes: queue text, journal_ms bigint, unread_ms bigint, after bigint, count integer
-- Returns: how many, and the last position that was checked (0 if all later rows stay)
-- Clauses: I-24
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
readers AS MATERIALIZED (
  SELECT queue, min(position) AS position FROM journal_readers
  WHERE queue IN (:queue, :queue || '/outbox') GROUP BY queue
),
window_ AS MATERIALIZED (
  SELECT seq, job_id, type, ts_ms, event_number FROM job_journal
  WHERE queue = :queue AND seq > :after ORDER BY seq LIMIT :count
),
trimmed AS (
  DELETE FROM job_journal n USING window_ w, clock c
  WHERE n.queue = :queue AND n.seq = w.seq AND w.ts_ms < c.now_ms - :journal_ms
    AND (w.ts_ms < c.now_ms - :unread_ms OR (SELECT r.position FROM readers r
      WHERE r.position < w.seq AND (r.queue = :queue OR w.event_number > 0) LIMIT 1) IS NULL)
    AND (w.type <> 'submit' OR (SELECT j.seq FROM {jobs} j WHERE j.job_id = w.job_id LIMIT 1) IS NULL)
    AND (w.event_number = 0 OR (SELECT e.seq FROM job_outbox_events e
      WHERE e.job_id = w.job_id || '.' || w.event_number LIMIT 1) IS NULL)
  RETURNING n.seq
)
SELECT (SELECT count(*) FROM trimmed) AS trimmed,
  CASE WHEN count(*) < :count OR max(w.ts_ms) > (SELECT now_ms FROM clock) - :journal_ms THEN 0
    WHEN max(w.ts_ms) > (SELECT now_ms FROM clock) - :unread_ms
      AND max(w.seq) > (SELECT r.position FROM readers r WHERE r.queue = :queue) THEN 0
    ELSE max(w.seq) END AS last
FROM window_ w

-- name: heartbeat
-- Stores that a worker is alive, and how many jobs it runs at once (0: unchanged).
-- Takes: queue text, worker_id text, slots integer
-- Returns: nothing
-- Clauses: I-25
INSERT INTO job_workers (queue, worker_id, seen_ms, slots) VALUES (:queue, :worker_id, {now}, :slots)
ON CONFLICT (queue, worker_id) DO UPDATE SET seen_ms = excluded.seen_ms,
  slots = CASE WHEN excluded.slots > 0 THEN excluded.slots ELSE job_workers.slots END
