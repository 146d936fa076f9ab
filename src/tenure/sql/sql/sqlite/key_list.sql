-- All API keys, oldest first.
-- Returns: their rows
-- Clauses: I-44
SELECT key_id, name, scopes, secret_h, created_ms, expires_ms, last_used_ms, quota FROM api_keys ORDER BY created_ms, key_id;
