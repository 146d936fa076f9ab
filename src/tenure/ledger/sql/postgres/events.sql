-- The events of one job after a version, oldest first: those that the journal lists by job, its first,
-- which its own row tells, its successes, which its attempts tell, and its first claim: where no other
-- step came before it, it is told by its attempt, or by the job's row while that lasts. An id may be used
-- again after its job was removed: what was before that is not of this job, and perhaps another requester's.
-- Takes: queue text, job_id text, after bigint, count integer, bytes bigint
-- Returns: their rows, up to the one with which their news reach so many bytes
-- The queue is compared as a text that no index has: the rows of a job are few, those of a queue many.
-- Clauses: I-31
WITH listed AS MATERIALIZED (
  SELECT ver, type, ts_ms, to_state, attempt, news_type, news_step, news, error_code
  FROM job_journal WHERE job_id = :job_id AND listed AND queue || '' = :queue
    AND seq > coalesce((SELECT max(r.seq) FROM job_journal r
      WHERE r.job_id = :job_id AND r.listed AND r.queue || '' = :queue AND r.type = 'remove'), 0)
)
SELECT ver, type, ts_ms, to_state, attempt, news_type, news_step, news, error_code FROM (
 SELECT history.*, sum(coalesce(octet_length(news), 0)) OVER (ORDER BY ver) - coalesce(octet_length(news), 0) AS bytes_before
 FROM (
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
WHERE ver > :after AND type NOT IN ('extend', 'remove')
ORDER BY ver LIMIT :count
) page
WHERE bytes_before < :bytes ORDER BY ver
