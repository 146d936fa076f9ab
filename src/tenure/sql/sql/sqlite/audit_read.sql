-- Actions of people, oldest first.
-- Takes: after bigint, count integer
-- Returns: a row each
-- Clauses: I-44
SELECT seq, number, prev, hash, entry FROM audit_log WHERE seq > :after ORDER BY seq LIMIT :count;
