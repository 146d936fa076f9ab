-- How far a reader of a queue's history has kept it elsewhere.
-- Takes: queue text, name text, position bigint
-- Returns: nothing
-- Clauses: I-24
INSERT INTO journal_readers (queue, name, position, seen_ms) VALUES (:queue, :name, :position, :now_ms)
ON CONFLICT (queue, name) DO UPDATE SET position = excluded.position, seen_ms = excluded.seen_ms;
