-- Ends sessions: one by its hash, or all of a key.
-- Takes: session_h text, key_id text
-- Returns: how many there were
-- Clauses: I-44
WITH gone AS (DELETE FROM api_sessions WHERE session_h = :session_h OR key_id = :key_id RETURNING 1)
SELECT count(*) AS gone FROM gone
