-- Takes an API key away, and ends its sessions.
-- Takes: key_id text
-- Returns: how many keys there were
-- Clauses: I-44
DELETE FROM api_sessions WHERE key_id = :key_id;
DELETE FROM api_keys WHERE key_id = :key_id;
SELECT changes() AS gone;
