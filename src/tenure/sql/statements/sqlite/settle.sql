-- Settling leases, and deciding about jobs that failed.
--
-- While a job is in `failed`, its column `due_ms` says when it runs again, or why it does not: -1 it was
-- buried, -2 cancelled, -3 it expired. `decide` reads it, and no other state has negative values.

-- name: settle
-- Ends leases: the job's row, the attempt's row and the journal in one step. A failed job stays in
-- `failed` until `decide`.
-- Batch: job_id text, fence bigint, token_h text, kind text, delay_ms bigint, retryable boolean
-- Batch: result text, result_h text, error text, attempt_error text, error_code text, outcome_h text
-- Takes: queue text
-- Returns: for each lease that was held its number, its job, the verdict, and when that is due again
-- Clauses: I-6 I-11 I-16 I-17 I-18 I-20 I-36
DELETE FROM temp.ending;
INSERT INTO temp.ending
SELECT a.n, j.seq, a.fence, a.token_h,
  CASE WHEN j.cancel_requested AND a.kind IN ('fail', 'retry', 'snooze', 'release') THEN 'cancel'
    WHEN a.kind = 'fail' AND NOT a.retryable THEN 'bury'
    WHEN a.kind IN ('fail', 'retry') AND j.attempt_count >= j.max_attempts THEN 'bury'
    WHEN a.kind = 'fail' THEN 'retry' ELSE a.kind END,
  a.delay_ms, a.result, a.result_h, a.error, a.attempt_error, a.error_code, a.outcome_h, j.status,
  j.lease_expires_at, j.worker_id, j.claimed_ms
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND j.lease_expires_at > 0;
UPDATE {jobs} AS j
SET status = CASE WHEN h.verdict = 'complete' THEN 'succeeded'
    WHEN h.verdict IN ('retry', 'bury', 'cancel') THEN 'failed' ELSE 'queued' END,
  passed = CASE WHEN h.verdict <> 'complete' THEN ''
    WHEN h.was = 'claimed' THEN 'fetching>processing>uploading>'
    WHEN h.was = 'fetching' THEN 'processing>uploading>'
    WHEN h.was = 'processing' THEN 'uploading>' ELSE '' END,
  ready = h.verdict = 'release' OR (h.verdict = 'snooze' AND h.delay_ms <= 0),
  due_ms = CASE WHEN h.verdict IN ('retry', 'snooze') AND h.delay_ms > 0
    THEN :now_ms + h.delay_ms WHEN h.verdict = 'bury' THEN -1 WHEN h.verdict = 'cancel' THEN -2
    ELSE 0 END,
  attempt_count = max(0, j.attempt_count - (h.verdict IN ('snooze', 'release'))),
  lease_expires_at = 0, lease_token_h = '', ver = j.ver + 1, updated_ms = :now_ms,
  worker_id = CASE WHEN h.verdict IN ('complete', 'bury', 'cancel') THEN j.worker_id ELSE '' END,
  cancel_requested = 0,
  result = CASE WHEN h.verdict = 'complete' THEN h.result ELSE j.result END,
  error = CASE WHEN h.verdict IN ('retry', 'bury', 'cancel') THEN h.error ELSE j.error END{count_event}
FROM temp.ending h
WHERE j.seq = h.seq;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, prev_lease_until_ms, gid, priority, due_ms, max_attempts,
  error_code, result_h, event_number)
SELECT :queue, j.job_id, j.ver,
  CASE WHEN h.verdict IN ('bury', 'cancel') THEN 'fail' ELSE h.verdict END, :now_ms, j.task, h.was, j.status, j.attempt_count, h.fence,
  h.fence, h.token_h, h.holder, h.lease_was, j.gid, j.priority, max(0, j.due_ms),
  j.max_attempts, h.error_code, CASE WHEN h.verdict = 'complete' THEN h.result_h ELSE '' END, {event_number}
FROM temp.ending h JOIN {jobs} j ON j.seq = h.seq ORDER BY h.n;
INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
  verdict, outcome_h, error_code, error, due_ms)
SELECT j.job_id, h.fence, :queue, j.attempt_count + (h.verdict IN ('snooze', 'release')), h.holder,
  h.claimed_ms, :now_ms, h.verdict, h.outcome_h, h.error_code, h.attempt_error, max(0, j.due_ms)
FROM temp.ending h JOIN {jobs} j ON j.seq = h.seq {known_attempt};
{after_settle}
{events_of_ended}
SELECT h.n, j.job_id, h.verdict, max(0, j.due_ms) AS due_ms FROM temp.ending h JOIN {jobs} j ON j.seq = h.seq;

-- name: complete
-- What `settle` does, for a batch of successes, which nearly all are.
-- Batch: job_id text, fence bigint, token_h text, result text, result_h text
-- Takes: queue text
-- Returns: how many of the leases were held; `settled` finds which
-- Clauses: I-6 I-11 I-16 I-17 I-36
DELETE FROM temp.ending;
INSERT INTO temp.ending
SELECT a.n, j.seq, a.fence, a.token_h, 'complete', 0, a.result, a.result_h, '', '', '',
  a.token_h || ':' || 'c:' || a.result_h, j.status, j.lease_expires_at, j.worker_id, j.claimed_ms
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.claim_version = a.fence AND j.lease_token_h = a.token_h AND j.lease_expires_at > 0;
UPDATE {jobs} AS j
SET status = 'succeeded', passed = CASE h.was WHEN 'claimed' THEN 'fetching>processing>uploading>'
    WHEN 'fetching' THEN 'processing>uploading>' WHEN 'processing' THEN 'uploading>' ELSE '' END,
  due_ms = 0, lease_expires_at = 0, lease_token_h = '', ver = j.ver + 1, updated_ms = :now_ms,
  cancel_requested = 0, result = h.result{count_event}
FROM temp.ending h
WHERE j.seq = h.seq;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, prev_lease_until_ms, gid, priority, max_attempts, result_h, event_number)
SELECT :queue, j.job_id, j.ver, 'complete', :now_ms, j.task, h.was, j.status, j.attempt_count, h.fence,
  h.fence, h.token_h, h.holder, h.lease_was, j.gid, j.priority, j.max_attempts, h.result_h, {event_number}
FROM temp.ending h JOIN {jobs} j ON j.seq = h.seq ORDER BY h.n;
INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
  verdict, outcome_h)
SELECT j.job_id, h.fence, :queue, j.attempt_count, h.holder, h.claimed_ms, :now_ms, 'complete', h.outcome_h
FROM temp.ending h JOIN {jobs} j ON j.seq = h.seq {known_attempt};
{after_settle}
{events_of_ended}
SELECT count(*) AS ended FROM temp.ending;

-- name: settled
-- The verdicts of leases that ended with exactly these outcomes, to answer a settle that is sent again.
-- Batch: job_id text, fence bigint, outcome_h text
-- Takes: queue text
-- Returns: for each outcome that was accepted before its number, its verdict and when the job was due
-- Clauses: I-17
SELECT a.n, t.verdict, t.due_ms
FROM {batch} a JOIN job_attempts t ON t.job_id = a.job_id AND t.claim_version = a.fence
WHERE t.queue = :queue AND t.outcome_h = a.outcome_h;

-- name: decide
-- Moves jobs out of `failed`: back to the queue while attempts are left and they were not given up,
-- else to their end. `mark` is 0 for a job that goes back, 1 buried, 2 cancelled, 3 expired.
-- Batch: job_id text
-- Takes: queue text
-- Returns: for each whether it was given up
-- Clauses: I-6 I-20 I-36
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id, n, was, mark)
SELECT j.job_id, a.n, 'failed',
  CASE WHEN j.due_ms < 0 THEN -j.due_ms ELSE j.attempt_count >= j.max_attempts END
FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE +j.queue = :queue AND +j.status = 'failed';
UPDATE {jobs} AS j
SET status = CASE WHEN c.mark THEN 'dead_letter' ELSE 'queued' END, passed = '',
  ready = NOT c.mark AND j.due_ms <= :now_ms,
  due_ms = CASE WHEN c.mark OR j.due_ms <= :now_ms THEN 0 ELSE j.due_ms END,
  ver = j.ver + 1, updated_ms = :now_ms{count_event}
FROM temp.chosen c WHERE j.job_id = c.job_id;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, gid, priority, due_ms, max_attempts, error_code, event_number)
SELECT :queue, j.job_id, j.ver,
  CASE c.mark WHEN 0 THEN 'promote' WHEN 2 THEN 'cancel' WHEN 3 THEN 'expire' ELSE 'bury' END,
  :now_ms, j.task, 'failed', j.status, j.attempt_count, j.claim_version, j.claim_version, j.gid,
  j.priority, j.due_ms, j.max_attempts,
  CASE WHEN c.mark AND json_valid(j.error) THEN coalesce(json_extract(j.error, '$.code'), '') ELSE '' END,
  {event_number}
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id ORDER BY c.n;
{after_decide}
{events_of_decided}
SELECT job_id, mark = 1 AS buried FROM temp.chosen;
