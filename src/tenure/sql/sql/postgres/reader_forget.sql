-- A reader that comes no more.
-- Takes: queue text, name text
-- Returns: its row, or none
-- Clauses: I-24
DELETE FROM journal_readers WHERE queue = :queue AND name = :name RETURNING name
