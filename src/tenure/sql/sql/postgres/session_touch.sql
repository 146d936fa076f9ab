-- Notes that a session was used.
-- Takes: session_h text
-- Returns: nothing
-- Clauses: I-44
UPDATE api_sessions SET seen_ms = {now} WHERE session_h = :session_h
