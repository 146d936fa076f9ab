-- Writes down an action of a person, and forgets the oldest beyond so many.
-- Takes: entry text, kept bigint
-- Returns: nothing
-- Clauses: I-44
WITH added AS (INSERT INTO audit_log (entry) VALUES (:entry) RETURNING seq)
DELETE FROM audit_log WHERE seq <= (SELECT seq FROM added) - :kept
