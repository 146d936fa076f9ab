-- Ends leases whose jobs succeeded: what `settle` does, for the outcome that is nearly all of them.
-- Batch: job_id text, fence bigint, token_h text, result text, result_h text
-- Alike: fence, result, result_h
-- Takes: queue text
-- Returns: how many of the leases were held; `settled` tells which
-- Clauses: I-6 I-11 I-16 I-17 I-36
DELETE FROM temp.succeeding;
INSERT INTO temp.succeeding
SELECT a.n, j.seq, a.fence, a.token_h, a.result, a.result_h, j.status, j.lease_expires_at
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND j.lease_expires_at > 0;
UPDATE {jobs} AS j
SET status = 'succeeded', passed = CASE h.was WHEN 'claimed' THEN 'fetching>processing>uploading>'
    WHEN 'fetching' THEN 'processing>uploading>' WHEN 'processing' THEN 'uploading>' ELSE '' END,
  lease_expires_at = 0, lease_token_h = '', ver = j.ver + 1, updated_ms = :now_ms,
  cancel_requested = 0, result = h.result{count_event}
FROM temp.succeeding h
WHERE j.seq = h.seq;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, prev_lease_until_ms, gid, priority, max_attempts, result_h, told)
SELECT :queue, j.job_id, j.ver, 'complete', :now_ms, j.task, h.was, j.status, j.attempt_count,
  h.fence, h.fence, h.token_h, j.worker_id, h.lease_was, j.gid, j.priority, j.max_attempts,
  h.result_h, {told}
FROM temp.succeeding h JOIN {jobs} j ON j.seq = h.seq ORDER BY h.n;
INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
  verdict, outcome_h)
SELECT j.job_id, h.fence, :queue, j.attempt_count, j.worker_id, j.claimed_ms, :now_ms, 'complete',
  h.token_h || ':' || 'c:' || h.result_h
FROM temp.succeeding h JOIN {jobs} j ON j.seq = h.seq{known_attempt};
{after_complete}
{tell_succeeded}
SELECT count(*) AS ended FROM temp.succeeding;
