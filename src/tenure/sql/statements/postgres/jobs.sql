-- Reading and managing jobs.

-- name: get
-- One job as it is stored.
-- Takes: job_id text
-- Returns: its row, or nothing
-- Clauses: I-30
SELECT job_id, queue, task, status, payload, result, error, attempt_count, max_attempts,
  claim_version, created_ms, updated_ms, due_ms, lease_expires_at, expires_ms, priority, gid,
  worker_id, requester_id, progress, trace, cancel_requested, lost_count, credential_refresh_count,
  event_count, credential_version, status_webhook_url, seq
FROM {jobs} WHERE job_id = :job_id

-- name: find
-- Jobs of a queue between two positions of the journal, newest first.
-- Takes: queue text, before bigint, least bigint, count integer
-- Returns: the position of each submit, and the job's row if it still exists
-- Clauses: I-30
SELECT e.seq AS position, j.job_id, j.queue, j.task, j.status, j.payload, j.result, j.error,
  j.attempt_count, j.max_attempts, j.claim_version, j.created_ms, j.updated_ms, j.due_ms,
  j.lease_expires_at, j.expires_ms, j.priority, j.gid, j.worker_id, j.requester_id, j.progress,
  j.trace, j.cancel_requested, j.lost_count, j.credential_refresh_count, j.event_count,
  j.credential_version, j.status_webhook_url, j.seq
FROM (SELECT seq, job_id, ts_ms FROM (
    SELECT * FROM (
      SELECT seq, job_id, ts_ms FROM job_journal
      WHERE queue = :queue AND type = 'submit' AND seq < :before AND seq >= :least
      ORDER BY seq DESC LIMIT :count) own
    UNION ALL
    SELECT * FROM (
      SELECT seq, job_id || '.' || event_number, ts_ms FROM job_journal
      WHERE queue = {inbox_queue} AND event_number > 0 AND seq < :before AND seq >= :least
      ORDER BY seq DESC LIMIT :count) steps
  ) pages ORDER BY seq DESC LIMIT :count) e
LEFT JOIN {jobs} j ON j.job_id = e.job_id AND j.created_ms = e.ts_ms
ORDER BY e.seq DESC

-- name: pruned
-- Whether a job existed and was removed after its retention time.
-- Takes: job_id text, queue text
-- Returns: its requester, or nothing
-- Clauses: I-34
SELECT requester_id, pruned_ms FROM pruned_jobs WHERE job_id = :job_id AND queue = :queue

-- name: attempts
-- The newest attempts at a job, oldest first. Running attempts are included for the plane only.
-- Takes: job_id text, count integer, bytes bigint
-- Returns: their rows, back to the one with which the errors reach so many bytes
-- Clauses: I-30
SELECT claim_version, attempt, worker_id, claimed_ms, ended_ms, verdict, error_code, error, due_ms FROM (
  SELECT t.claim_version, t.attempt, t.worker_id, t.claimed_ms, t.ended_ms, t.verdict, t.error_code,
    t.error, t.due_ms,
    sum(octet_length(t.error)) OVER (ORDER BY t.claim_version DESC) - octet_length(t.error) AS bytes_after
  FROM (SELECT t.* FROM {jobs} j JOIN job_attempts t ON t.job_id = j.job_id AND t.queue = j.queue
    WHERE j.job_id = :job_id ORDER BY t.claim_version DESC LIMIT :count) t
) newest
WHERE bytes_after < :bytes ORDER BY claim_version

-- name: events
-- The events of one job after a version, oldest first. They come from the `listed` rows of the journal; the
-- submit comes from the job's own row, successes come from its attempts, and a first claim as second step
-- comes from its attempt, or from the job's row while it runs. An id may be used again after its job was
-- removed: earlier events are of another job, perhaps of another requester.
-- Takes: queue text, job_id text, after bigint, count integer, bytes bigint
-- Returns: their rows, up to the one with which the reports reach `bytes` bytes
-- `IS TRUE` keeps the planner from using the index on the queue: a page is read by the job's versions.
-- Clauses: I-31
WITH listed AS MATERIALIZED (
  SELECT ver, type, ts_ms, to_state, attempt, news_type, news_step, news, error_code
  FROM job_journal WHERE job_id = :job_id AND listed AND (queue = :queue) IS TRUE
    AND ver > :after AND type NOT IN ('extend', 'remove')
    AND (seq > coalesce((SELECT max(r.seq) FROM job_journal r
      WHERE r.job_id = :job_id AND (r.queue = :queue) IS TRUE AND r.type = 'remove'), 0)) IS TRUE
  ORDER BY ver LIMIT :count
)
SELECT ver, type, ts_ms, to_state, attempt, news_type, news_step, news, error_code FROM (
 SELECT page.*, sum(coalesce(octet_length(news), 0)) OVER (ORDER BY ver) - coalesce(octet_length(news), 0) AS bytes_before
 FROM (SELECT * FROM (
  SELECT * FROM listed
  UNION ALL
  SELECT 1, 'submit', j.created_ms, 'queued', 0, NULL, NULL, NULL, ''
  FROM {jobs} j
  WHERE j.job_id = :job_id AND j.queue = :queue
    AND (SELECT l.ver FROM listed l WHERE l.ver = 1 LIMIT 1) IS NULL
  UNION ALL
  SELECT t.ver, t.verdict, t.ended_ms, 'succeeded', t.attempt, NULL, NULL, NULL, ''
  FROM job_attempts t WHERE t.job_id = :job_id AND t.queue = :queue AND t.ver > 0
  UNION ALL
  SELECT 2, 'claim', first.claimed_ms, 'claimed', first.attempt, NULL, NULL, NULL, '' FROM (
    SELECT t.claimed_ms, t.attempt FROM job_attempts t
    WHERE t.job_id = :job_id AND t.claim_version = 1 AND t.queue = :queue AND t.ended_ms > 0
    UNION ALL
    SELECT j.claimed_ms, j.attempt_count FROM {jobs} j
    WHERE j.job_id = :job_id AND j.queue = :queue AND j.claim_version = 1 AND j.status IN {running}
  ) first
  WHERE (SELECT l.ver FROM listed l WHERE l.ver = 2 LIMIT 1) IS NULL
) history
WHERE ver > :after
ORDER BY ver LIMIT :count
) page
) weighed
WHERE bytes_before < :bytes ORDER BY ver

-- name: counts
-- How many jobs are in which state.
-- Takes: queue text
-- Returns: a row for each state there is
-- Clauses: I-25
SELECT status, count(*) AS jobs FROM {jobs} WHERE queue = :queue GROUP BY status

-- name: summary
-- Whether a queue is paused, how long its oldest job waits, and how many workers it has.
-- Takes: queue text
-- Returns: one row
-- Clauses: I-25
SELECT {now} AS now_ms,
  coalesce((SELECT paused FROM job_queues WHERE queue = :queue), false) AS paused,
  coalesce((SELECT created_ms FROM {jobs} WHERE queue = :queue AND ready
    ORDER BY priority, seq LIMIT 1), 0) AS oldest_ms,
  (SELECT count(*) FROM (
    SELECT worker_id FROM job_workers WHERE queue = :queue AND seen_ms > {now} - 15000
    UNION SELECT worker_id FROM {jobs} WHERE queue = :queue AND status IN {running}) w) AS workers

-- name: unfinished
-- How many jobs of one requester have not ended, counted up to `most`.
-- Takes: queue text, requester text, most integer
-- Returns: the number
-- Clauses: I-25
SELECT count(*) AS jobs FROM (
  SELECT 1 FROM {jobs} WHERE queue = :queue AND ready AND requester_id = :requester
  UNION ALL
  SELECT 1 FROM {jobs} WHERE queue = :queue AND status = 'queued' AND NOT ready AND due_ms > 0
    AND requester_id = :requester
  UNION ALL
  SELECT 1 FROM {jobs} WHERE queue = :queue AND status IN {running} AND lease_expires_at > 0
    AND requester_id = :requester
  LIMIT :most) unfinished

-- name: workers
-- The workers of a queue, including idle ones.
-- Takes: queue text
-- Returns: a row for each worker that sent a heartbeat lately
-- Clauses: I-25
SELECT worker_id, seen_ms, slots FROM job_workers
WHERE queue = :queue AND seen_ms > {now} - 15000 ORDER BY worker_id

-- name: probe
-- Checks whether the database accepts writes, by a write that changes nothing.
-- Takes: queue text
-- Returns: nothing
-- Clauses: I-29
INSERT INTO job_queues (queue) VALUES (:queue)
ON CONFLICT (queue) DO UPDATE SET paused = job_queues.paused

-- name: pause
-- Stops or resumes handing out leases; waits for running claims.
-- Takes: queue text, paused boolean, channel text
-- Returns: nothing
-- Clauses: I-29
WITH gate AS MATERIALIZED (
  SELECT pg_advisory_xact_lock(hashtext(current_schema()), hashtext(:queue))
),
changed AS (
  INSERT INTO job_queues (queue, paused) SELECT :queue, :paused FROM gate
  ON CONFLICT (queue) DO UPDATE SET paused = excluded.paused
  WHERE job_queues.paused IS DISTINCT FROM excluded.paused
  RETURNING queue
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, type, ts_ms)
  SELECT queue, '', CASE WHEN :paused THEN 'pause' ELSE 'resume' END, {now} FROM changed
)
SELECT pg_notify(:channel, :queue) FROM changed

-- name: cancel
-- Fails waiting jobs (by way of `claimed`, the only permitted transition) and marks running ones for their
-- holders; `decide` ends the failed ones.
-- Batch: job_id text
-- Takes: queue text
-- Returns: for each known job its number and the state that was found
-- Clauses: I-6 I-26
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
found AS MATERIALIZED (
  SELECT a.n, j.job_id, j.status AS was
  FROM (SELECT * FROM {batch}) a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.queue = :queue
  ORDER BY j.job_id
  FOR UPDATE OF j
),
marked AS (
  UPDATE {jobs} j SET cancel_requested = true FROM found f
  WHERE j.job_id = f.job_id AND (f.was IN {running}) IS TRUE
),
ended AS (
  UPDATE {jobs} j
  SET status = 'failed', ready = false, due_ms = -2, updated_ms = c.now_ms,
    ver = j.ver + CASE WHEN f.was = 'queued' THEN 1 ELSE 0 END,
    passed = CASE WHEN f.was = 'queued' THEN 'claimed>' ELSE '' END,
    error = '{"code":"cancelled","message":"cancelled on request","retryable":false}'
  FROM found f, clock c
  WHERE j.job_id = f.job_id AND f.was IN ('queued', 'failed')
  RETURNING j.job_id, f.was, j.ver, j.task, j.attempt_count, j.claim_version, j.gid, j.priority,
    j.max_attempts, j.updated_ms
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, gid, priority, max_attempts, error_code)
  SELECT :queue, job_id, ver, 'fail', updated_ms, task, was, 'failed', attempt_count,
    claim_version, claim_version, gid, priority, max_attempts, 'cancelled'
  FROM ended WHERE was = 'queued'
)
SELECT n, was FROM found

-- name: reopen
-- Restarts ended jobs: a new row replaces the old one and takes its id and claim version. It is not an
-- update, because the transition table permits none out of a final state.
-- Batch: job_id text
-- Takes: queue text, channel text
-- Returns: for each known job its number and the state that was found
-- Clauses: I-6 I-27
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
found AS MATERIALIZED (
  SELECT a.n, j.job_id, j.status AS was
  FROM (SELECT * FROM {batch}) a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.queue = :queue
  ORDER BY j.job_id
  FOR UPDATE OF j
),
gone AS (
  DELETE FROM {jobs} j USING found f
  WHERE j.job_id = f.job_id AND f.was IN ('succeeded', 'dead_letter')
  RETURNING j.*
),
fresh AS (
  INSERT INTO {jobs} (job_id, queue, task, priority, max_attempts, ver, claim_version, event_count,
    created_ms, updated_ms, gid, requester_id, request_hash, trace, status_webhook_url, refresh_url,
    payload, payload_h, credential_version, storage_creds_encrypted, storage_creds_dek_wrapped,
    storage_creds_kek_id, storage_creds_encryption_version)
  SELECT g.job_id, g.queue, g.task, g.priority, g.max_attempts, g.ver + 1, g.claim_version,
    g.event_count, g.created_ms, c.now_ms, g.gid, g.requester_id, g.request_hash, g.trace,
    g.status_webhook_url, g.refresh_url, g.payload, g.payload_h, g.credential_version, g.storage_creds_encrypted,
    g.storage_creds_dek_wrapped, g.storage_creds_kek_id, g.storage_creds_encryption_version
  FROM gone g, clock c
  RETURNING job_id, ver, claim_version, updated_ms
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, fence,
    prev_fence, gid, priority, max_attempts)
  SELECT :queue, f.job_id, f.ver, 'reopen', f.updated_ms, g.task, g.status, 'queued', f.claim_version,
    f.claim_version, g.gid, g.priority, g.max_attempts
  FROM fresh f JOIN gone g ON g.job_id = f.job_id
),
notified AS MATERIALIZED (SELECT pg_notify(:channel, :queue) FROM (SELECT 1 FROM fresh LIMIT 1) one)
SELECT n, was FROM found LEFT JOIN notified ON true

-- name: remove
-- Deletes jobs that are not running, with their attempts and keys.
-- Batch: job_id text
-- Takes: queue text
-- Returns: for each known job its number and the state that was found
-- Clauses: I-28
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
found AS MATERIALIZED (
  SELECT a.n, j.job_id, j.status AS was
  FROM (SELECT * FROM {batch}) a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.queue = :queue
  ORDER BY j.job_id
  FOR UPDATE OF j
),
gone AS (
  DELETE FROM {jobs} j USING found f
  WHERE j.job_id = f.job_id AND (f.was NOT IN {running}) IS TRUE
  RETURNING j.job_id, j.ver, j.task, j.status, j.attempt_count, j.claim_version
),
attempts AS (
  DELETE FROM job_attempts t USING gone g WHERE t.job_id = g.job_id AND t.queue = :queue
),
keys AS (
  DELETE FROM idempotency_keys k USING gone g
  WHERE k.job_id = g.job_id COLLATE "default" AND k.queue || '' = :queue
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, attempt, fence,
    prev_fence)
  SELECT :queue, g.job_id, g.ver + 1, 'remove', c.now_ms, g.task, g.status, g.attempt_count,
    g.claim_version, g.claim_version
  FROM gone g, clock c
)
SELECT n, was FROM found
