-- Takes an API key away.
-- Takes: key_id text
-- Returns: how many there were
-- Clauses: I-44
DELETE FROM api_keys WHERE key_id = :key_id;
SELECT changes() AS gone;
