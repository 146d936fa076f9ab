-- Up to which transaction all have ended, and which would be the next to begin.
-- Returns: one row
-- Clauses: I-32
SELECT 1 AS ended, 1 AS next;
