-- The events of one job after a version, oldest first. An id may be used again after its job was removed:
-- what was before that is not of this job, and perhaps another requester's.
-- Takes: queue text, job_id text, after bigint, count integer, bytes bigint
-- Returns: their rows, up to the one with which their news reach so many bytes
-- Clauses: I-31
SELECT ver, type, ts_ms, to_state, attempt, news_type, news_step, news, error_code FROM (
SELECT ver, type, ts_ms, to_state, attempt, news_type, news_step, news, error_code,
  sum(coalesce(length(CAST(news AS BLOB)), 0)) OVER (ORDER BY ver) - coalesce(length(CAST(news AS BLOB)), 0) AS bytes_before
FROM {history}
WHERE queue = :queue AND job_id = :job_id AND ver > :after AND type NOT IN ('extend', 'remove')
  AND seq > coalesce((SELECT max(r.seq) FROM job_journal r
    -- Not by the index of the queue: its whole history would be read.
    WHERE r.job_id = :job_id AND r.queue || '' = :queue AND r.type = 'remove'), 0)
ORDER BY ver LIMIT :count
) page
WHERE bytes_before < :bytes ORDER BY ver;
