-- Who reads a queue's history, and how far each has come.
-- Takes: queue text
-- Returns: their rows
-- Clauses: I-24
SELECT name, position, seen_ms FROM journal_readers WHERE queue = :queue ORDER BY name;
