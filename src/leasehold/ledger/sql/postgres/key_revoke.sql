-- Takes an API key away.
-- Takes: key_id text
-- Returns: how many there were
-- Clauses: I-44
WITH gone AS (DELETE FROM api_keys WHERE key_id = :key_id RETURNING 1)
SELECT count(*) AS gone FROM gone
