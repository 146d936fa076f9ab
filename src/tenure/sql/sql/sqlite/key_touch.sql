-- Notes that an API key was used.
-- Takes: key_id text
-- Returns: nothing
-- Clauses: I-44
UPDATE api_keys SET last_used_ms = :now_ms WHERE key_id = :key_id;
