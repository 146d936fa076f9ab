-- Statements that only this engine has.

-- name: copy_begin
-- Begins a submit by COPY. COPY cannot handle conflicts, so a sample of the jobs is looked up first.
-- The sequence numbers of the rows are allocated here, so that two concurrent submits keep the order in
-- which they began.
-- Batch: job_id text, requester_id text, idempotency_key text
-- Takes: queue text, channel text, count integer
-- Returns: the time, whether a job of the sample is stored, and if not the numbers for jobs and journal
-- Clauses: I-1 I-2 I-3
WITH sampled AS MATERIALIZED (SELECT EXISTS (
  SELECT FROM {batch}
  WHERE (SELECT j.job_id FROM {jobs} j WHERE j.job_id = given.job_id LIMIT 1) IS NOT NULL
    OR (given.idempotency_key <> '' AND (SELECT k.job_id FROM idempotency_keys k
      WHERE k.queue = :queue AND k.requester_id = given.requester_id
        AND k.idempotency_key = given.idempotency_key LIMIT 1) IS NOT NULL)
) AS known)
SELECT {now} AS now_ms, pg_notify(:channel, :queue), s.known,
  array(SELECT nextval('{jobs}_seq_seq') FROM generate_series(1, :count) WHERE NOT s.known) AS turns,
  array(SELECT nextval('job_journal_seq_seq') FROM generate_series(1, :count) WHERE NOT s.known)
    AS positions
FROM sampled s
