-- Upkeep: changes that become due with time.

-- name: upkeep_needed
-- Whether upkeep has something to do, read without the write lock.
-- Takes: queue text
-- Returns: whether a lease expired, a job is due or past its time to live; whether a job is in `failed`;
--   whether an event waits for an earlier one
-- Clauses: I-10 I-12
SELECT EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND lease_expires_at > 0
    AND lease_expires_at < :now_ms AND status IN {running})
  OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND due_ms > 0 AND due_ms <= :now_ms
    AND status = 'queued' AND NOT ready)
  OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND expires_ms > 0
    AND expires_ms <= :now_ms AND status = 'queued') AS overdue,
  EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND status = 'failed') AS has_failed,
  {held_back} AS held_back;

-- name: reap
-- Reclaims expired leases: the job keeps its turn, or fails if no attempt is left or too many leases were lost.
-- Takes: queue text, lost_max integer, count integer
-- Returns: for each reclaimed lease whether its job failed; `decide` ends it
-- Clauses: I-10 I-14
DELETE FROM temp.lapsed;
INSERT INTO temp.lapsed
SELECT job_id, status, lease_expires_at, worker_id, claimed_ms, claim_version, cancel_requested,
  cancel_requested OR lost_count + 1 >= :lost_max OR attempt_count >= max_attempts
FROM {jobs}
WHERE queue = :queue AND lease_expires_at > 0 AND lease_expires_at < :now_ms
  AND status IN {running}
ORDER BY lease_expires_at LIMIT :count;
UPDATE {jobs} AS j
SET status = CASE WHEN l.ends THEN 'failed' ELSE 'queued' END, passed = '', ready = NOT l.ends,
  due_ms = CASE WHEN l.cancelled THEN -2 WHEN l.ends THEN -1 ELSE 0 END,
  lost_count = j.lost_count + 1, lease_expires_at = 0, lease_token_h = '',
  worker_id = CASE WHEN l.ends THEN j.worker_id ELSE '' END, cancel_requested = 0,
  ver = j.ver + 1, updated_ms = :now_ms,
  error = CASE WHEN l.cancelled THEN '{"code":"cancelled","message":"cancelled on request; the '
      || 'worker let its lease run out","retryable":false}'
    WHEN l.ends THEN '{"code":"lease_lost","message":"the lease ran out ' || (j.lost_count + 1)
      || ' time(s) without an outcome, at start ' || j.attempt_count || ' of ' || j.max_attempts
      || ': each worker that took the job died, hung or was cut off","retryable":false}'
    ELSE j.error END
FROM temp.lapsed l
WHERE j.job_id = l.job_id AND j.claim_version = l.fence;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, worker_id, prev_lease_until_ms, gid, priority, max_attempts)
SELECT :queue, l.job_id, j.ver, 'reap', :now_ms, j.task, l.was,
  CASE WHEN l.ends THEN 'failed' ELSE 'queued' END, j.attempt_count, l.fence, l.fence, l.holder,
  l.lease_was, j.gid, j.priority, j.max_attempts
FROM temp.lapsed l JOIN {jobs} j ON j.job_id = l.job_id;
INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
  verdict, outcome_h, error_code)
SELECT l.job_id, l.fence, :queue, j.attempt_count, l.holder, l.claimed_ms, :now_ms, 'lost', '',
  'lease_lost'
FROM temp.lapsed l JOIN {jobs} j ON j.job_id = l.job_id {known_attempt};
SELECT job_id, ends FROM temp.lapsed;

-- name: expire
-- Fails jobs that were not started within their time to live; `decide` ends them.
-- Takes: queue text, count integer
-- Returns: how many
-- `mark` is 1 for a job that fails, 0 for one that was started before and only loses its time to live.
-- Clauses: I-21
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id, mark)
SELECT job_id, attempt_count = 0 FROM {jobs}
WHERE queue = :queue AND expires_ms > 0 AND expires_ms <= :now_ms AND status = 'queued'
ORDER BY expires_ms LIMIT :count;
UPDATE {jobs} SET expires_ms = 0
WHERE job_id IN (SELECT job_id FROM temp.chosen WHERE NOT mark);
UPDATE {jobs}
SET status = 'failed', passed = 'claimed>', ready = 0, due_ms = -3, ver = ver + 1,
  updated_ms = :now_ms,
  error = '{"code":"expired","message":"not started within its time to live","retryable":false}'
WHERE job_id IN (SELECT job_id FROM temp.chosen WHERE mark);
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, gid, priority, max_attempts, error_code)
SELECT :queue, j.job_id, j.ver, 'fail', :now_ms, j.task, 'queued', 'failed', j.attempt_count,
  j.claim_version, j.claim_version, j.gid, j.priority, j.max_attempts, 'expired'
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id WHERE c.mark;
SELECT count(*) AS expired FROM temp.chosen WHERE mark;

-- name: promote
-- Makes delayed jobs claimable that are due.
-- Takes: queue text, count integer, channel text
-- Returns: how many
-- Clauses: I-19 I-22
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id)
SELECT job_id FROM {jobs}
WHERE queue = :queue AND due_ms > 0 AND due_ms <= :now_ms AND status = 'queued' AND NOT ready
ORDER BY due_ms LIMIT :count;
UPDATE {jobs} SET ready = 1 WHERE job_id IN (SELECT job_id FROM temp.chosen);
SELECT count(*) AS promoted FROM temp.chosen;

-- name: failed_jobs
-- The jobs in `failed`, which wait for `decide`.
-- Takes: queue text, count integer
-- Returns: their ids
-- Clauses: I-6
SELECT job_id FROM {jobs} WHERE queue = :queue AND status = 'failed' LIMIT :count;

-- name: unblock
-- Makes events claimable that were committed after the event before them had ended.
-- Takes: queue text, after bigint, count integer
-- Returns: how many, and the last number that was checked (0 if there are no later ones)
-- Clauses: I-22
DELETE FROM temp.old;
INSERT INTO temp.old
SELECT j.job_id, j.seq, 0, (SELECT e.seq FROM {jobs} e WHERE e.gid = j.gid AND e.seq < j.seq
  AND e.status NOT IN ('succeeded', 'dead_letter') LIMIT 1) IS NULL
FROM {jobs} j
WHERE j.queue = :queue AND j.status = 'queued' AND NOT j.ready AND j.due_ms = 0 AND j.seq > :after
ORDER BY j.seq LIMIT :count;
UPDATE {jobs} SET ready = 1 WHERE job_id IN (SELECT job_id FROM temp.old WHERE goes);
SELECT coalesce(sum(goes), 0) AS freed,
  CASE WHEN count(*) < :count THEN 0 ELSE max(seq) END AS last
FROM temp.old;

-- name: prune
-- Removes jobs that ended long ago, with their attempts and keys, and leaves a tombstone for each.
-- Takes: queue text, keep_ms bigint, after bigint, count integer
-- Returns: how many, and the last position that was checked (0 if all later jobs are too young)
-- Clauses: I-23 I-34
DELETE FROM temp.old;
INSERT INTO temp.old
SELECT e.job_id, e.seq, e.ts_ms, j.status IN ('succeeded', 'dead_letter')
  AND j.updated_ms < :now_ms - :keep_ms
  AND NOT EXISTS (SELECT 1 FROM job_outbox_events o WHERE o.gid = j.job_id
    AND o.status NOT IN ('succeeded', 'dead_letter'))
FROM (SELECT job_id, max(seq) AS seq, max(ts_ms) AS ts_ms FROM (SELECT job_id, seq, ts_ms FROM (
      SELECT * FROM (
        SELECT job_id, seq, ts_ms FROM job_journal
        WHERE queue = :queue AND type = 'submit' AND seq > :after
        ORDER BY seq LIMIT :count) own
      UNION ALL
      SELECT * FROM (
        SELECT job_id, seq, ts_ms FROM job_event_submits
        WHERE queue = :queue AND type = 'submit' AND seq > :after
        ORDER BY seq LIMIT :count) steps
    ) ORDER BY seq LIMIT :count) GROUP BY job_id) e
LEFT JOIN {jobs} j ON j.job_id = e.job_id;
INSERT OR IGNORE INTO pruned_jobs (job_id, queue, requester_id, pruned_ms)
SELECT j.job_id, :queue, j.requester_id, :now_ms
FROM temp.old o JOIN {jobs} j ON j.job_id = o.job_id WHERE o.goes;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, attempt, fence,
  prev_fence, data)
SELECT :queue, j.job_id, j.ver + 1, 'remove', :now_ms, j.task, j.status, j.attempt_count,
  j.claim_version, j.claim_version, 'kept long enough'
FROM temp.old o JOIN {jobs} j ON j.job_id = o.job_id WHERE o.goes;
DELETE FROM job_attempts
WHERE queue = :queue AND job_id IN (SELECT job_id FROM temp.old WHERE goes);
DELETE FROM idempotency_keys
WHERE queue = :queue AND job_id IN (SELECT job_id FROM temp.old WHERE goes);
DELETE FROM {jobs} WHERE job_id IN (SELECT job_id FROM temp.old WHERE goes);
SELECT coalesce(sum(goes), 0) AS pruned,
  CASE WHEN count(*) < :count OR max(created_ms) > :now_ms - :keep_ms THEN 0
    ELSE max(seq) END AS last
FROM temp.old;

-- name: trim
-- Removes expired idempotency keys of ended jobs, old tombstones and tickets, and workers without a recent
-- heartbeat.
-- Takes: queue text, tombstone_ms bigint
-- Returns: nothing
-- Clauses: I-3 I-24
DELETE FROM idempotency_keys
WHERE queue = :queue AND expires_ms <= :now_ms AND NOT EXISTS (SELECT 1 FROM {jobs} j
  WHERE j.job_id = idempotency_keys.job_id AND j.status NOT IN ('succeeded', 'dead_letter'));
DELETE FROM pruned_jobs WHERE pruned_ms < :now_ms - :tombstone_ms;
DELETE FROM api_tickets WHERE expires_ms < :now_ms;
DELETE FROM job_workers WHERE queue = :queue AND seen_ms < :now_ms - 3600000;

-- name: trim_journal
-- Removes the oldest journal rows, except the submits of jobs and events that still exist, which list them,
-- and rows that a reader has not captured, unless they are older than `unread_ms`.
-- Takes: queue text, journal_ms bigint, unread_ms bigint, after bigint, count integer
-- Returns: how many, and the last position that was checked (0 if all later rows stay)
-- Clauses: I-24
DELETE FROM temp.window_;
INSERT INTO temp.window_
SELECT seq, ts_ms, ts_ms < :now_ms - :journal_ms
  AND (ts_ms < :now_ms - :unread_ms OR NOT EXISTS (SELECT 1 FROM journal_readers r
    WHERE r.position < job_journal.seq
      AND (r.queue = :queue OR (event_number > 0 AND r.queue = :queue || '/outbox'))))
  AND NOT (type = 'submit' AND EXISTS (SELECT 1 FROM {jobs} j WHERE j.job_id = job_journal.job_id))
  AND NOT (event_number > 0 AND EXISTS (SELECT 1 FROM job_outbox_events e
    WHERE e.job_id = job_journal.job_id || '.' || event_number))
FROM job_journal WHERE queue = :queue AND seq > :after ORDER BY seq LIMIT :count;
DELETE FROM job_journal WHERE seq IN (SELECT seq FROM temp.window_ WHERE goes);
SELECT coalesce(sum(goes), 0) AS trimmed,
  CASE WHEN count(*) < :count OR max(ts_ms) > :now_ms - :journal_ms THEN 0
    WHEN max(ts_ms) > :now_ms - :unread_ms AND max(seq)
      > (SELECT min(r.position) FROM journal_readers r WHERE r.queue = :queue) THEN 0
    ELSE max(seq) END AS last
FROM temp.window_;

-- name: heartbeat
-- Stores that a worker is alive, and how many jobs it runs at once (0: unchanged).
-- Takes: queue text, worker_id text, slots integer
-- Returns: nothing
-- Clauses: I-25
INSERT INTO job_workers (queue, worker_id, seen_ms, slots) VALUES (:queue, :worker_id, :now_ms, :slots)
ON CONFLICT (queue, worker_id) DO UPDATE SET seen_ms = excluded.seen_ms,
  slots = CASE WHEN excluded.slots > 0 THEN excluded.slots ELSE job_workers.slots END;
