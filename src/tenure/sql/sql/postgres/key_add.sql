-- Keeps an API key: all but its secret, of which a hash is kept.
-- Takes: key_id text, name text, scopes text, secret_h text, ttl_ms bigint
-- Returns: when it was made
-- Clauses: I-44
INSERT INTO api_keys (key_id, name, scopes, secret_h, created_ms, expires_ms)
SELECT :key_id, :name, :scopes, :secret_h, now_ms, CASE WHEN :ttl_ms > 0 THEN now_ms + :ttl_ms ELSE 0 END
FROM (SELECT {now} AS now_ms) clock
RETURNING created_ms, expires_ms
