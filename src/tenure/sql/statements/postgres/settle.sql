-- Settling leases, and deciding about jobs that failed.
--
-- While a job is in `failed`, its column `due_ms` says when it runs again, or why it does not: -1 it was
-- buried, -2 cancelled, -3 it expired. `decide` reads it, and no other state has negative values.

-- name: settle
-- Ends leases: writes the job's row, the attempt's row and the journal in one step. A row that changed
-- since it was read (by an extend or a cancel) is left out, and the caller tries again.
-- A failed job stays in `failed` until `decide`.
-- The caller sorts the batch by job id, so that two batches do not deadlock.
-- Batch: job_id text, fence bigint, token_h text, kind text, delay_ms bigint, retryable boolean
-- Batch: result text, result_h text, error text, attempt_error text, error_code text, outcome_h text
-- Takes: queue text
-- Returns: for each lease that was held its number, its job, the verdict, and when the job is due again;
--   for the inbox whether an event was written
-- Clauses: I-6 I-11 I-16 I-17 I-18 I-20 I-36
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
requested AS MATERIALIZED (SELECT * FROM {batch}),
held AS MATERIALIZED (
  SELECT a.*, j.ctid AS place, j.status AS was, j.lease_expires_at AS lease_was, j.worker_id AS holder, j.claimed_ms,
    j.ver AS ver_was, j.cancel_requested AS cancel_was,
    CASE WHEN j.cancel_requested AND a.kind IN ('fail', 'retry', 'snooze', 'release') THEN 'cancel'
      WHEN a.kind = 'fail' AND NOT a.retryable THEN 'bury'
      WHEN a.kind IN ('fail', 'retry') AND j.attempt_count >= j.max_attempts THEN 'bury'
      WHEN a.kind = 'fail' THEN 'retry' ELSE a.kind END AS verdict
  FROM requested a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND (j.status IN {running}) IS TRUE
),
ended AS (
  UPDATE {jobs} j
  SET status = CASE WHEN h.verdict = 'complete' THEN 'succeeded'
      WHEN h.verdict IN ('retry', 'bury', 'cancel') THEN 'failed' ELSE 'queued' END,
    passed = CASE WHEN h.verdict <> 'complete' THEN ''
      WHEN h.was = 'claimed' THEN 'fetching>processing>uploading>'
      WHEN h.was = 'fetching' THEN 'processing>uploading>'
      WHEN h.was = 'processing' THEN 'uploading>' ELSE '' END,
    ready = h.verdict = 'release' OR (h.verdict = 'snooze' AND h.delay_ms <= 0),
    due_ms = CASE WHEN h.verdict IN ('retry', 'snooze') AND h.delay_ms > 0
      THEN c.now_ms + h.delay_ms WHEN h.verdict = 'bury' THEN -1 WHEN h.verdict = 'cancel' THEN -2
      ELSE 0 END,
    attempt_count = greatest(0, j.attempt_count
      - CASE WHEN h.verdict IN ('snooze', 'release') THEN 1 ELSE 0 END),
    lease_expires_at = 0, lease_token_h = '', ver = j.ver + 1, updated_ms = c.now_ms,
    worker_id = CASE WHEN h.verdict IN ('complete', 'bury', 'cancel') THEN j.worker_id ELSE '' END,
    cancel_requested = false,
    result = CASE WHEN h.verdict = 'complete' THEN h.result ELSE j.result END,
    error = CASE WHEN h.verdict IN ('retry', 'bury', 'cancel') THEN h.error ELSE j.error END{count_event}
  FROM held h, clock c
  WHERE j.ctid = h.place AND j.claim_version = h.fence AND j.ver = h.ver_was
    AND j.cancel_requested = h.cancel_was
  RETURNING h.n, h.job_id, h.fence, h.verdict, h.was, h.lease_was, h.token_h, h.holder, h.claimed_ms,
    h.result_h, h.attempt_error, h.error_code, h.outcome_h, j.due_ms, j.ver, j.status,
    j.attempt_count, j.max_attempts, j.task, j.gid, j.priority, j.updated_ms,
    j.requester_id, j.status_webhook_url, j.trace{event_columns}
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, token_h, worker_id, prev_lease_until_ms, gid, priority, due_ms, max_attempts,
    error_code, result_h, event_number, listed)
  SELECT :queue, job_id, ver, CASE WHEN verdict IN ('bury', 'cancel') THEN 'fail' ELSE verdict END,
    updated_ms, task, was, status, attempt_count, fence, fence,
    token_h, holder, lease_was, gid, priority, greatest(0, due_ms), max_attempts, error_code,
    CASE WHEN verdict = 'complete' THEN result_h ELSE '' END, {event_number}, verdict <> 'complete'
  FROM ended
),
attempts AS (
  INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
    verdict, outcome_h, error_code, error, due_ms, ver)
  SELECT job_id, fence, :queue, attempt_count + CASE WHEN verdict IN ('snooze', 'release') THEN 1
    ELSE 0 END, holder, claimed_ms, updated_ms, verdict, outcome_h, error_code, attempt_error,
    greatest(0, due_ms), CASE WHEN verdict = 'complete' THEN ver ELSE 0 END
  FROM ended {known_attempt}, ver = excluded.ver
){after_settle}{events_of_ended}
SELECT n, job_id, verdict, greatest(0, due_ms) AS due_ms{has_event} FROM ended

-- name: complete
-- What `settle` does, for a batch of successes, which nearly all are. Without it CPU per job of the inbox
-- with events is 1.1 times as high (1.2 times that of the settle; interleaved, 2026-11-18).
-- Batch: job_id text, fence bigint, token_h text, result text, result_h text
-- Constant: fence, result, result_h
-- Takes: queue text
-- Returns: how many of the leases were held (`settled` finds which); for the inbox whether an event was written
-- Clauses: I-6 I-11 I-16 I-17 I-36
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
held AS MATERIALIZED (
  SELECT a.*, j.ctid AS place, j.status AS was, j.lease_expires_at AS lease_was, j.ver AS ver_was
  FROM (SELECT * FROM {batch}) a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND (j.status IN {running}) IS TRUE
),
ended AS (
  UPDATE {jobs} j
  SET status = 'succeeded', passed = CASE h.was WHEN 'claimed' THEN 'fetching>processing>uploading>'
      WHEN 'fetching' THEN 'processing>uploading>' WHEN 'processing' THEN 'uploading>' ELSE '' END,
    due_ms = 0, lease_expires_at = 0, lease_token_h = '', ver = j.ver + 1, updated_ms = c.now_ms,
    cancel_requested = false, result = h.result{count_event}
  FROM held h, clock c
  WHERE j.ctid = h.place AND j.claim_version = h.fence AND j.ver = h.ver_was
  RETURNING j.job_id, h.fence, h.was, h.lease_was, h.token_h, h.result_h, j.worker_id, j.claimed_ms,
    j.ver, j.status, j.attempt_count, j.max_attempts, j.task, j.gid, j.priority, j.updated_ms,
    j.requester_id, j.status_webhook_url, j.trace{event_columns}
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, token_h, worker_id, prev_lease_until_ms, gid, priority, max_attempts,
    result_h, event_number, listed)
  SELECT :queue, job_id, ver, 'complete', updated_ms, task, was, status, attempt_count, fence, fence,
    token_h, worker_id, lease_was, gid, priority, max_attempts, result_h, {event_number}, false
  FROM ended
),
attempts AS (
  INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
    verdict, outcome_h, ver)
  SELECT job_id, fence, :queue, attempt_count, worker_id, claimed_ms, updated_ms, 'complete',
    token_h || ':' || 'c:' || result_h, ver
  FROM ended {known_attempt}, ver = excluded.ver
){after_settle}{events_of_ended}
SELECT count(*) AS ended{any_event} FROM ended

-- name: settled
-- The verdicts of leases that ended with exactly these outcomes, to answer a settle that is sent again.
-- Batch: job_id text, fence bigint, outcome_h text
-- Takes: queue text
-- Returns: for each outcome that was accepted before its number, its verdict and when the job was due
-- Clauses: I-17
SELECT a.n, t.verdict, t.due_ms
FROM (SELECT * FROM {batch}) a JOIN job_attempts t ON t.job_id = a.job_id AND t.claim_version = a.fence
WHERE t.queue = :queue AND t.outcome_h = a.outcome_h

-- name: decide
-- Moves jobs out of `failed`: back to the queue while attempts are left and they were not given up,
-- else to their end. `ending` is 0 for a job that goes back, 1 buried, 2 cancelled, 3 expired.
-- Batch: job_id text
-- Takes: queue text
-- Returns: for each job whether it was given up; for the inbox whether an event was written
-- Clauses: I-6 I-20 I-36
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
failed AS MATERIALIZED (
  SELECT j.job_id, j.due_ms,
    CASE WHEN j.due_ms < 0 THEN -j.due_ms WHEN j.attempt_count >= j.max_attempts THEN 1 ELSE 0 END AS ending
  FROM (SELECT * FROM {batch}) a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.queue = :queue AND (j.status = 'failed') IS TRUE
  ORDER BY j.job_id
  FOR UPDATE OF j
),
ended AS (
  UPDATE {jobs} j
  SET status = CASE WHEN r.ending > 0 THEN 'dead_letter' ELSE 'queued' END, passed = '',
    ready = r.ending = 0 AND r.due_ms <= c.now_ms,
    due_ms = CASE WHEN r.ending > 0 OR r.due_ms <= c.now_ms THEN 0 ELSE r.due_ms END,
    ver = j.ver + 1, updated_ms = c.now_ms{count_event}
  FROM failed r, clock c
  WHERE j.job_id = r.job_id AND (j.status = 'failed') IS TRUE
  RETURNING j.job_id, 'failed' AS was, r.ending, j.ver, j.task, j.status, j.attempt_count, j.claim_version,
    j.gid, j.priority, j.due_ms, j.max_attempts, j.updated_ms, j.requester_id, j.status_webhook_url,
    j.trace, coalesce(substring(j.error FROM '"code":"([^"]*)"'), '') AS code{event_columns}
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, gid, priority, due_ms, max_attempts, error_code, event_number)
  SELECT :queue, job_id, ver,
    CASE ending WHEN 0 THEN 'promote' WHEN 2 THEN 'cancel' WHEN 3 THEN 'expire' ELSE 'bury' END,
    updated_ms, task, was, status, attempt_count, claim_version, claim_version, gid, priority, due_ms,
    max_attempts, CASE WHEN ending > 0 THEN code ELSE '' END, {event_number}
  FROM ended
){after_settle}{events_of_ended}
SELECT job_id, ending = 1 AS buried{has_event} FROM ended
