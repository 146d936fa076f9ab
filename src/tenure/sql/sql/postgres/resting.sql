-- The jobs that rest in `failed` and wait for `decide`.
-- Takes: queue text, count integer
-- Returns: their ids
-- Clauses: I-6
SELECT job_id FROM {jobs} WHERE queue = :queue AND status = 'failed' LIMIT :count
