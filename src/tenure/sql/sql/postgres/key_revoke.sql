-- Takes an API key away, and ends its sessions.
-- Takes: key_id text
-- Returns: how many keys there were
-- Clauses: I-44
WITH gone AS (DELETE FROM api_keys WHERE key_id = :key_id RETURNING 1),
sessions AS (DELETE FROM api_sessions WHERE key_id = :key_id)
SELECT count(*) AS gone FROM gone
