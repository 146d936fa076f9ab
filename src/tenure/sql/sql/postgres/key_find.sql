-- One API key, expired or not.
-- Takes: key_id text
-- Returns: its row, or nothing
-- Clauses: I-44
SELECT key_id, name, scopes, secret_h, created_ms, expires_ms, last_used_ms, quota FROM api_keys WHERE key_id = :key_id
