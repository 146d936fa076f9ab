-- The events of one job after a version, oldest first. An id may be used again after its job was removed:
-- what was before that is not of this job, and perhaps another requester's.
-- Takes: queue text, job_id text, after bigint, count integer
-- Returns: their rows
-- Clauses: I-31
SELECT ver, type, ts_ms, to_state, attempt, news_type, news_step, news, error_code
FROM {history}
WHERE queue = :queue AND job_id = :job_id AND ver > :after AND type NOT IN ('extend', 'remove')
  AND seq > coalesce((SELECT max(r.seq) FROM job_journal r
    WHERE r.job_id = :job_id AND r.queue = :queue AND r.type = 'remove'), 0)
ORDER BY ver LIMIT :count;
