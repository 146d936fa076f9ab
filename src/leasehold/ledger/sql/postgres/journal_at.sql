-- The last step of a queue at or before a position, and when it was: for a search by time.
-- Takes: queue text, seq bigint
-- Returns: one row, or none
-- Clauses: I-32
SELECT seq, ts_ms FROM {journal} WHERE queue = :queue AND seq <= :seq
ORDER BY seq DESC LIMIT 1
