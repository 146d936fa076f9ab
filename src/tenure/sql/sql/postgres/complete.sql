-- Ends leases whose jobs succeeded: what `settle` does, for the outcome that is nearly all of them. A
-- row that changed since it was read, by an extend or a report, is left for another try.
-- Whoever calls sorts the batch by job id, so that two batches never wait for each other.
-- Batch: job_id text, fence bigint, token_h text, result text, result_h text
-- Alike: fence, result, result_h
-- Takes: queue text
-- Returns: how many of the leases were held (`settled` tells which); of the inbox whether one of them has
--   an event
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
    lease_expires_at = 0, lease_token_h = '', ver = j.ver + 1, updated_ms = c.now_ms,
    cancel_requested = false, result = h.result{count_event}
  FROM held h, clock c
  WHERE j.ctid = h.place AND j.claim_version = h.fence AND j.ver = h.ver_was
  RETURNING h.n, j.job_id, h.fence, h.was, h.lease_was, h.token_h, h.result_h, j.worker_id,
    j.claimed_ms, j.ver, j.status, j.attempt_count, j.max_attempts, j.task, j.gid, j.priority,
    j.updated_ms, j.requester_id, j.status_webhook_url, j.trace{event_columns}
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt,
    fence, prev_fence, token_h, worker_id, prev_lease_until_ms, gid, priority, max_attempts,
    result_h, told, listed)
  SELECT :queue, job_id, ver, 'complete', updated_ms, task, was, status, attempt_count, fence, fence,
    token_h, worker_id, lease_was, gid, priority, max_attempts, result_h, {told}, false
  FROM ended
),
kept AS (
  INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
    verdict, outcome_h, ver)
  SELECT job_id, fence, :queue, attempt_count, worker_id, claimed_ms, updated_ms, 'complete',
    token_h || ':' || 'c:' || result_h, ver
  FROM ended{known_attempt}, ver = excluded.ver
){after_settle}{tell_ended}
SELECT count(*) AS ended{tells_any} FROM ended
