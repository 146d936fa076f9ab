-- Statements that only this engine has.

-- name: copy_begin
-- Opens a submit by COPY: the time, the news of it, and whether some of it is known already. Then the
-- rows go in by statements that tell one job from another; what is asked here is a sample.
-- The turns and positions of the rows are given out here, so that two that run side by side keep the
-- order in which they began.
-- Batch: job_id text, requester_id text, idempotency_key text
-- Takes: queue text, channel text, count integer
-- Returns: the time, whether one of the sample is stored, and if not as many turns and positions
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
