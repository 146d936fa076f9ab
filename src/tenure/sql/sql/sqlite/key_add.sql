-- Keeps an API key: all but its secret, of which a hash is kept.
-- Takes: key_id text, name text, scopes text, secret_h text, ttl_ms bigint
-- Returns: when it was made
-- Clauses: I-44
INSERT INTO api_keys (key_id, name, scopes, secret_h, created_ms, expires_ms)
VALUES (:key_id, :name, :scopes, :secret_h, :now_ms, CASE WHEN :ttl_ms > 0 THEN :now_ms + :ttl_ms ELSE 0 END);
SELECT created_ms, expires_ms FROM api_keys WHERE key_id = :key_id;
