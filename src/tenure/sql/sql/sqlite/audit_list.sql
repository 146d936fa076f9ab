-- Actions of people, newest first.
-- Takes: through bigint, count integer
-- Returns: a row each
-- Clauses: I-44
SELECT seq, number, prev, hash, entry FROM audit_log WHERE seq <= :through ORDER BY seq DESC LIMIT :count;
