-- Claims, and what the holder of a lease may do before it settles: extend, report.

-- name: claim
-- Takes leases on the next jobs: writes the lease, counts the attempt and appends to the journal.
-- Takes: queue text, count integer, lease_ms bigint, worker_id text, token_h text, check_due boolean
-- Takes: from_priority integer, from_seq bigint, expired_from_ms bigint, share integer, requester_max integer
-- Returns: the time, whether the queue is paused, whether something is overdue (then nothing is taken),
--   when the next waiting job is due, whether jobs may have been left to others of their requester,
--   and a lease on each row (one row without a lease if none)
-- Clauses: I-7 I-8 I-9 I-12 I-36
DELETE FROM temp.head;
INSERT INTO temp.head
SELECT :now_ms, coalesce((SELECT paused FROM job_queues WHERE queue = :queue), 0),
  :check_due AND (
    EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND lease_expires_at > 0
      AND lease_expires_at >= :expired_from_ms AND lease_expires_at < :now_ms AND status IN {running})
    OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND due_ms > 0 AND due_ms <= :now_ms
      AND status = 'queued' AND NOT ready)
    OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND expires_ms > 0
      AND expires_ms <= :now_ms AND status = 'queued')),
  CASE WHEN :check_due THEN (SELECT due_ms FROM {jobs} WHERE queue = :queue AND due_ms > 0
    AND status = 'queued' AND NOT ready ORDER BY due_ms LIMIT 1) END;
DELETE FROM temp.taking;
INSERT INTO temp.taking (seq, was)
SELECT j.seq, j.status FROM {jobs} j
WHERE j.queue = :queue AND j.ready AND j.status = 'queued' AND {in_turn}
  AND NOT EXISTS (SELECT 1 FROM temp.head WHERE paused OR overdue)
ORDER BY j.priority, j.seq LIMIT :count;
UPDATE {jobs} AS j
SET status = 'claimed', passed = '', ready = 0, due_ms = 0, worker_id = :worker_id,
  lease_token_h = :token_h, claimed_ms = :now_ms, heartbeat_at = :now_ms,
  lease_expires_at = :now_ms + :lease_ms, claim_version = claim_version + 1,
  attempt_count = attempt_count + 1, ver = ver + 1, updated_ms = :now_ms{count_event}
WHERE j.seq IN (SELECT seq FROM temp.taking);
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, lease_until_ms, gid, priority, max_attempts, event_number)
SELECT :queue, j.job_id, j.ver, 'claim', :now_ms, j.task, 'queued', 'claimed', j.attempt_count,
  j.claim_version, j.claim_version - 1, :token_h, :worker_id, j.lease_expires_at, j.gid, j.priority,
  j.max_attempts, {event_number}
FROM temp.taking h JOIN {jobs} j ON j.seq = h.seq ORDER BY h.turn;
{events_of_taken}
SELECT h.now_ms, h.paused, h.overdue, coalesce(h.next_due_ms, 0) AS next_due_ms,
  :share > 0 AND EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND ready) AS left_by_share, t.job_id, t.task,
  t.payload, t.attempt_count, t.max_attempts, t.claim_version, t.lease_expires_at, t.created_ms, t.expires_ms,
  t.gid, t.priority, t.trace, t.seq, t.requester_id, t.status_webhook_url, t.credential_version
FROM temp.head h
LEFT JOIN (SELECT j.*, c.turn FROM temp.taking c JOIN {jobs} j ON j.seq = c.seq) t
ORDER BY t.turn;

-- name: recover
-- The leases of claims whose answers were lost, found by the hashes of their tokens.
-- Takes: queue text, token_hs text[], count integer, bytes bigint
-- Returns: the time and a lease in each row, up to the one with which the payloads reach `bytes` bytes
-- Clauses: I-13
SELECT :now_ms AS now_ms, job_id, task, payload, attempt_count, max_attempts, claim_version,
  lease_expires_at, created_ms, expires_ms, gid, priority, trace, seq, requester_id, status_webhook_url,
  credential_version, lease_token_h
FROM {jobs}
WHERE job_id IN (SELECT job_id FROM (
  SELECT job_id, sum(size) OVER (ORDER BY priority, seq) - size AS bytes_before FROM (
    SELECT job_id, priority, seq, length(CAST(payload AS BLOB)) AS size FROM {jobs}
    WHERE queue = :queue AND lease_expires_at > 0
      AND lease_token_h IN (SELECT value FROM json_each(:token_hs))
    ORDER BY priority, seq LIMIT :count))
  WHERE bytes_before < :bytes)
ORDER BY priority, seq;

-- name: extend
-- Extends leases: with `always` all of them, else those of which less than two thirds are left.
-- Batch: job_id text, fence bigint, token_h text
-- Takes: queue text, lease_ms bigint, always boolean
-- Returns: for each lease that is still held its number, when it expires, the time, and whether a cancel
--   was requested
-- `mark` is when the lease would have expired.
-- Clauses: I-11 I-14 P-11
DELETE FROM temp.chosen;
INSERT OR IGNORE INTO temp.chosen (job_id, mark)
SELECT j.job_id, j.lease_expires_at
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND j.lease_expires_at > 0
  AND (:always OR 3 * (j.lease_expires_at - :now_ms) < 2 * :lease_ms);
UPDATE {jobs}
SET lease_expires_at = max(:now_ms + :lease_ms, lease_expires_at), heartbeat_at = :now_ms,
  ver = ver + 1, updated_ms = :now_ms
WHERE job_id IN (SELECT job_id FROM temp.chosen);
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, lease_until_ms, prev_lease_until_ms, gid, priority, max_attempts)
SELECT :queue, j.job_id, j.ver, 'extend', :now_ms, j.task, j.status, j.status, j.attempt_count,
  j.claim_version, j.claim_version, j.lease_token_h, j.worker_id, j.lease_expires_at, c.mark, j.gid,
  j.priority, j.max_attempts
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id;
SELECT a.n, j.lease_expires_at, :now_ms AS now_ms, j.cancel_requested
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND j.lease_expires_at > 0;

-- name: report
-- Stores reports of running attempts; a report that names a stage moves the job to it.
-- `news_type`, `news_step` and `news` of the journal hold the type, step and data of a report.
-- Batch: job_id text, fence bigint, token_h text, type text, step text, data text, progress text
-- Batch: stage text
-- Takes: queue text
-- Returns: for each report whose lease is held its number, the state it found and the state it left
-- Clauses: I-5 I-11 I-15
DELETE FROM temp.reports;
INSERT INTO temp.reports
SELECT a.n, a.job_id, a.type, a.step, a.data, a.progress, j.status, j.ver,
  CASE WHEN a.stage = '' OR a.stage = j.status THEN j.status
    WHEN j.status || '>' || a.stage IN ('claimed>fetching', 'claimed>processing',
      'claimed>uploading', 'fetching>processing', 'fetching>uploading', 'processing>uploading')
    THEN a.stage END,
  row_number() OVER (PARTITION BY a.job_id ORDER BY a.n)
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND j.lease_expires_at > 0;
UPDATE {jobs} AS j
SET status = s.becomes, ver = j.ver + s.steps, updated_ms = :now_ms,
  progress = coalesce((SELECT m.progress FROM temp.reports m WHERE m.job_id = s.job_id
    AND m.progress <> '' ORDER BY m.n DESC LIMIT 1), j.progress),
  passed = CASE WHEN s.was || '>' || s.becomes = 'claimed>processing' THEN 'fetching>'
    WHEN s.was || '>' || s.becomes = 'claimed>uploading' THEN 'fetching>processing>'
    WHEN s.was || '>' || s.becomes = 'fetching>uploading' THEN 'processing>' ELSE '' END
FROM (SELECT job_id, max(nth) AS steps, max(becomes) AS becomes, max(was) AS was FROM temp.reports
  GROUP BY job_id HAVING count(becomes) = count(*)) s
WHERE j.job_id = s.job_id;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, lease_until_ms, prev_lease_until_ms, gid, priority, max_attempts,
  data, news_type, news_step, news)
SELECT :queue, m.job_id, m.ver_was + m.nth, 'report', :now_ms, j.task, m.was, m.becomes,
  j.attempt_count, j.claim_version, j.claim_version, j.lease_token_h, j.worker_id,
  j.lease_expires_at, j.lease_expires_at, j.gid, j.priority, j.max_attempts, m.type, m.type, m.step,
  m.data
FROM temp.reports m JOIN {jobs} j ON j.job_id = m.job_id
WHERE m.becomes IS NOT NULL ORDER BY m.n;
SELECT n, was, coalesce(becomes, '') AS becomes FROM temp.reports;

-- name: refuse
-- Records in the journal that writes under lost leases were refused. No job changes.
-- Batch: job_id text, fence bigint, token_h text, worker_id text
-- Takes: queue text, operation text
-- Returns: for each refusal its number and what the job is now (nothing for a job that this queue does not have)
-- Clauses: I-11
INSERT INTO job_journal (queue, job_id, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, error_code, data)
SELECT :queue, a.job_id, 'reject', :now_ms, coalesce(j.task, ''), coalesce(j.status, ''),
  coalesce(j.status, ''), coalesce(j.attempt_count, 0), a.fence, coalesce(j.claim_version, 0),
  a.token_h, a.worker_id, 'lease_lost', :operation
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id AND j.queue = :queue; -- an unknown id writes nothing
SELECT a.n, j.status, j.claim_version FROM {batch} a
  LEFT JOIN {jobs} j ON j.job_id = a.job_id AND j.queue = :queue;
