-- Keeps a session, as a hash; forgets those that are over, and the oldest of a key beyond so many.
-- Takes: session_h text, key_id text, ttl_ms bigint, idle_ms bigint, others bigint
-- Returns: nothing
-- Clauses: I-44
DELETE FROM api_sessions
WHERE expires_ms <= :now_ms OR seen_ms + idle_ms <= :now_ms OR session_h IN (
  SELECT o.session_h FROM api_sessions o WHERE o.key_id = :key_id
  ORDER BY o.created_ms DESC, o.session_h LIMIT -1 OFFSET :others);
INSERT INTO api_sessions (session_h, key_id, created_ms, expires_ms, idle_ms, seen_ms)
VALUES (:session_h, :key_id, :now_ms, :now_ms + :ttl_ms, :idle_ms, :now_ms);
