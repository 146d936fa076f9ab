-- Keeps a session, as a hash; forgets those that are over, and the oldest of a key beyond so many.
-- Takes: session_h text, key_id text, ttl_ms bigint, idle_ms bigint, others bigint
-- Returns: nothing
-- Clauses: I-44
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
gone AS (
  DELETE FROM api_sessions s USING clock c
  WHERE s.expires_ms <= c.now_ms OR s.seen_ms + s.idle_ms <= c.now_ms OR s.session_h IN (
    SELECT o.session_h FROM api_sessions o WHERE o.key_id = :key_id
    ORDER BY o.created_ms DESC, o.session_h OFFSET :others)
)
INSERT INTO api_sessions (session_h, key_id, created_ms, expires_ms, idle_ms, seen_ms)
SELECT :session_h, :key_id, c.now_ms, c.now_ms + :ttl_ms, :idle_ms, c.now_ms FROM clock c
