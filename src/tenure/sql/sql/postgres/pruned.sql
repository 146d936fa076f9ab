-- Whether a job was here and was kept long enough.
-- Takes: job_id text, queue text
-- Returns: whose it was, or nothing
-- Clauses: I-34
SELECT requester_id, pruned_ms FROM pruned_jobs WHERE job_id = :job_id AND queue = :queue
