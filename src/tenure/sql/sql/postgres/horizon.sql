-- Up to which transaction all have ended, and which would be the next to begin.
-- Returns: one row
-- Clauses: I-32
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS ended,
  pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next
