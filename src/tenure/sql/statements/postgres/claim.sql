-- Claims, and what the holder of a lease may do before it settles: extend, report.

-- name: claim
-- Takes leases on the next jobs: writes the lease, counts the attempt and appends to the journal.
-- Takes: queue text, count integer, lease_ms bigint, worker_id text, token_h text, check_due boolean
-- Takes: from_priority integer, from_seq bigint, expired_from_ms bigint, share integer, requester_max integer
-- Returns: on the first row the time, whether the queue is paused, whether something is overdue (then
--   nothing is taken), when the next waiting job is due, and whether jobs were left because their
--   requester has its share; on each further row a lease
-- Clauses: I-7 I-8 I-9 I-12 I-36
WITH clock AS MATERIALIZED (
  SELECT {now} AS now_ms, queue_is_paused(:queue) AS paused
),
due_work AS MATERIALIZED (
  SELECT c.now_ms, c.paused, :check_due AND (
    EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status IN {running}
      AND lease_expires_at >= :expired_from_ms AND lease_expires_at < c.now_ms)
    OR EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status = 'queued' AND NOT ready
      AND due_ms > 0 AND due_ms <= c.now_ms)
    OR EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status = 'queued' AND expires_ms > 0
      AND expires_ms <= c.now_ms)
  ) AS overdue,
  CASE WHEN :check_due THEN (SELECT min(due_ms) FROM {jobs} WHERE queue = :queue AND status = 'queued'
    AND NOT ready AND due_ms > 0) END AS next_due_ms
  FROM clock c
),
urgent AS MATERIALIZED (
  SELECT j.ctid AS place FROM {jobs} j
  WHERE j.queue = :queue AND j.ready AND j.priority < :from_priority AND {in_turn}
  ORDER BY j.priority, j.seq
  LIMIT (SELECT CASE WHEN paused OR overdue THEN 0 ELSE :count END FROM due_work)
  FOR UPDATE SKIP LOCKED
),
next AS MATERIALIZED (
  SELECT j.ctid AS place FROM {jobs} j
  WHERE j.queue = :queue AND j.ready AND (j.priority, j.seq) > (:from_priority, :from_seq)
    AND {in_turn}
  ORDER BY j.priority, j.seq
  LIMIT (SELECT CASE WHEN paused OR overdue THEN 0 ELSE :count - (SELECT count(*) FROM urgent) END
    FROM due_work)
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
    j.lease_expires_at, j.created_ms, j.expires_ms, j.gid, j.priority, j.trace, j.seq, j.ver, j.updated_ms,
    j.requester_id, j.status_webhook_url, j.credential_version, j.status, 'queued' AS was{event_columns}
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, token_h, worker_id, lease_until_ms, gid, priority, max_attempts, event_number, listed)
  SELECT :queue, job_id, ver, 'claim', updated_ms, task, 'queued', 'claimed', attempt_count,
    claim_version, claim_version - 1, :token_h, :worker_id, lease_expires_at, gid, priority,
    max_attempts, {event_number}, ver > 2
  FROM taken
){events_of_taken}
SELECT now_ms, paused, overdue, coalesce(next_due_ms, 0) AS next_due_ms,
  (:share > 0 OR :requester_max > 0) AND EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND ready)
    AS left_by_share, NULL AS job_id, NULL AS task,
  NULL AS payload, NULL AS attempt_count, NULL AS max_attempts, NULL AS claim_version,
  NULL AS lease_expires_at, NULL AS created_ms, NULL AS expires_ms, NULL AS gid, NULL AS priority, NULL AS trace,
  NULL AS seq, NULL AS requester_id, NULL AS status_webhook_url, NULL AS credential_version
FROM due_work
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, job_id, task, payload, attempt_count, max_attempts, claim_version,
  lease_expires_at, created_ms, expires_ms, gid, priority, trace, seq, requester_id, status_webhook_url,
  credential_version
FROM taken
ORDER BY priority NULLS FIRST, seq

-- name: recover
-- The leases of claims whose answers were lost, found by the hashes of their tokens.
-- Takes: queue text, token_hs text[], count integer, bytes bigint
-- Returns: the time and a lease in each row, up to the one with which the payloads reach `bytes` bytes
-- Clauses: I-13
SELECT {now} AS now_ms, job_id, task, payload, attempt_count, max_attempts, claim_version,
  lease_expires_at, created_ms, expires_ms, gid, priority, trace, seq, requester_id, status_webhook_url,
  credential_version, lease_token_h
FROM (
  SELECT held.*, sum(octet_length(payload)) OVER (ORDER BY priority, seq) - octet_length(payload) AS bytes_before
  FROM (SELECT * FROM {jobs}
    WHERE queue = :queue AND status IN {running} AND lease_token_h = ANY (:token_hs)
    ORDER BY priority, seq LIMIT :count) held
) weighed
WHERE bytes_before < :bytes
ORDER BY priority, seq

-- name: extend
-- Extends leases: with `always` all of them, else those of which less than two thirds are left.
-- Batch: job_id text, fence bigint, token_h text
-- Takes: queue text, lease_ms bigint, always boolean
-- Returns: for each lease that is still held its number, when it expires, the time, and whether a cancel
--   was requested
-- Clauses: I-11 I-14 P-11
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
requested AS MATERIALIZED (SELECT * FROM {batch}),
expiring AS MATERIALIZED (
  SELECT j.job_id, j.lease_expires_at AS was
  FROM requested a, {jobs} j, clock c
  WHERE j.job_id = a.job_id AND j.claim_version = a.fence AND j.lease_token_h = a.token_h
    AND (j.status IN {running}) IS TRUE
    AND (:always OR 3 * (j.lease_expires_at - c.now_ms) < 2 * :lease_ms)
  ORDER BY j.job_id
  FOR UPDATE OF j
),
extended AS (
  UPDATE {jobs} j
  SET lease_expires_at = greatest(c.now_ms + :lease_ms, s.was), heartbeat_at = c.now_ms,
    ver = j.ver + 1, updated_ms = c.now_ms
  FROM expiring s, clock c
  WHERE j.job_id = s.job_id
  RETURNING j.job_id, j.lease_expires_at, s.was, j.ver, j.task, j.status, j.attempt_count,
    j.max_attempts, j.claim_version, j.lease_token_h, j.worker_id, j.gid, j.priority, j.updated_ms
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, token_h, worker_id, lease_until_ms, prev_lease_until_ms, gid, priority,
    max_attempts)
  SELECT :queue, job_id, ver, 'extend', updated_ms, task, status, status, attempt_count,
    claim_version, claim_version, lease_token_h, worker_id, lease_expires_at, was, gid, priority,
    max_attempts
  FROM extended
)
SELECT a.n, c.now_ms, j.cancel_requested,
  CASE WHEN a.job_id IN (SELECT job_id FROM extended)
    THEN greatest(c.now_ms + :lease_ms, j.lease_expires_at) ELSE j.lease_expires_at
    END AS lease_expires_at
FROM clock c, requested a
JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND (j.status IN {running}) IS TRUE

-- name: report
-- Stores reports of running attempts; a report that names a stage moves the job to it.
-- `news_type`, `news_step` and `news` of the journal hold the type, step and data of a report.
-- Batch: job_id text, fence bigint, token_h text, type text, step text, data text, progress text
-- Batch: stage text
-- Takes: queue text
-- Returns: for each report whose lease is held its number, the state it found and the state it left
-- Clauses: I-5 I-11 I-15
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
requested AS MATERIALIZED (SELECT * FROM {batch}),
held AS MATERIALIZED (
  SELECT a.*, j.status AS was, j.ver AS ver_was
  FROM requested a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND (j.status IN {running}) IS TRUE
  ORDER BY j.job_id
  FOR UPDATE OF j
),
moves AS MATERIALIZED (
  SELECT h.*, row_number() OVER (PARTITION BY h.job_id ORDER BY h.n) AS nth,
    CASE WHEN h.stage = '' OR h.stage = h.was THEN h.was
      WHEN h.was || '>' || h.stage IN ('claimed>fetching', 'claimed>processing',
        'claimed>uploading', 'fetching>processing', 'fetching>uploading', 'processing>uploading')
      THEN h.stage END AS becomes
  FROM held h
),
sums AS MATERIALIZED (
  SELECT job_id, max(ver_was) AS ver_was, max(nth) AS steps, max(becomes) AS becomes, max(was) AS was,
    (array_agg(progress ORDER BY n DESC) FILTER (WHERE progress <> ''))[1] AS progress,
    array_agg(type ORDER BY n) AS types, array_agg(step ORDER BY n) AS step_names,
    array_agg(data ORDER BY n) AS data
  FROM moves GROUP BY job_id HAVING bool_and(becomes IS NOT NULL)
),
moved AS (
  UPDATE {jobs} j
  SET status = s.becomes, ver = j.ver + s.steps, progress = coalesce(s.progress, j.progress),
    updated_ms = c.now_ms,
    passed = CASE WHEN s.was || '>' || s.becomes = 'claimed>processing' THEN 'fetching>'
      WHEN s.was || '>' || s.becomes = 'claimed>uploading' THEN 'fetching>processing>'
      WHEN s.was || '>' || s.becomes = 'fetching>uploading' THEN 'processing>' ELSE '' END
  FROM sums s, clock c
  WHERE j.job_id = s.job_id
  RETURNING j.job_id, j.task, j.attempt_count, j.max_attempts, j.claim_version, j.lease_token_h,
    j.worker_id, j.gid, j.priority, j.lease_expires_at, j.updated_ms, s.ver_was, s.was, s.becomes,
    s.types, s.step_names, s.data
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, token_h, worker_id, lease_until_ms, prev_lease_until_ms, gid, priority,
    max_attempts, data, news_type, news_step, news)
  SELECT :queue, d.job_id, d.ver_was + m.nth, 'report', d.updated_ms, d.task, d.was, d.becomes,
    d.attempt_count, d.claim_version, d.claim_version, d.lease_token_h, d.worker_id,
    d.lease_expires_at, d.lease_expires_at, d.gid, d.priority, d.max_attempts, m.type,
    m.type, m.step, m.data
  FROM moved d, unnest(d.types, d.step_names, d.data) WITH ORDINALITY AS m(type, step, data, nth)
)
SELECT m.n, m.was, coalesce(m.becomes, '') AS becomes FROM moves m

-- name: refuse
-- Records in the journal that writes under lost leases were refused. No job changes.
-- Batch: job_id text, fence bigint, token_h text, worker_id text
-- Takes: queue text, operation text
-- Returns: for each refusal its number and what the job is now (nothing for a job that this queue does not have)
-- Clauses: I-11
WITH seen AS MATERIALIZED (
  SELECT a.n, a.job_id, a.fence AS shown, a.token_h, a.worker_id, j.status, j.claim_version, j.task,
    j.attempt_count
  FROM (SELECT * FROM {batch}) a LEFT JOIN {jobs} j ON j.job_id = a.job_id AND j.queue = :queue
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, type, ts_ms, task, from_state, to_state, attempt, fence,
    prev_fence, token_h, worker_id, error_code, data)
  SELECT :queue, job_id, 'reject', {now}, coalesce(task, ''), coalesce(status, ''),
    coalesce(status, ''), coalesce(attempt_count, 0), shown, coalesce(claim_version, 0), token_h,
    worker_id, 'lease_lost', :operation
  FROM seen WHERE status IS NOT NULL -- an unknown id writes nothing
)
SELECT n, status, claim_version FROM seen
