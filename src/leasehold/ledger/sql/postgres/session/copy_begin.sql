-- Opens a submit by COPY: the time, the news of it, and whether some of it is known already. Then the
-- rows go in by statements that tell one job from another; what is asked here is a sample.
-- Batch: job_id text, requester_id text, idempotency_key text
-- Takes: queue text, channel text
-- Returns: the time, and whether one of the sample is stored
-- Clauses: I-1 I-2 I-3
SELECT {now} AS now_ms, pg_notify(:channel, :queue), EXISTS (
  SELECT FROM {batch}
  WHERE (SELECT j.job_id FROM {jobs} j WHERE j.job_id = given.job_id LIMIT 1) IS NOT NULL
    OR (given.idempotency_key <> '' AND (SELECT k.job_id FROM idempotency_keys k
      WHERE k.queue = :queue AND k.requester_id = given.requester_id
        AND k.idempotency_key = given.idempotency_key LIMIT 1) IS NOT NULL)
) AS known
