-- The events of one job after a version, oldest first.
-- Takes: queue text, job_id text, after bigint, count integer
-- Returns: their rows
-- Clauses: I-31
SELECT ver, type, ts_ms, to_state, attempt, news_type, news_step, news, error_code
FROM {history}
WHERE queue = :queue AND job_id = :job_id AND ver > :after AND type NOT IN ('extend', 'remove')
ORDER BY ver LIMIT :count;
