-- Sessions that are not over: one by its hash, or all for an empty one.
-- Takes: session_h text
-- Returns: their rows, oldest first, and how long ago each was used
-- Clauses: I-44
SELECT session_h, key_id, created_ms, expires_ms, idle_ms, seen_ms, :now_ms - seen_ms AS unused_ms
FROM api_sessions
WHERE (:session_h = '' OR session_h = :session_h) AND expires_ms > :now_ms AND seen_ms + idle_ms > :now_ms
ORDER BY created_ms;
