-- Writes down an action of a person, and forgets the oldest beyond so many.
-- Takes: entry text, kept bigint
-- Returns: nothing
-- Clauses: I-44
INSERT INTO audit_log (entry) VALUES (:entry);
DELETE FROM audit_log WHERE seq <= last_insert_rowid() - :kept;
