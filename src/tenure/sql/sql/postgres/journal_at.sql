-- The last step of a queue at or before a position, and when it was: for a search by time.
-- Takes: queue text, seq bigint
-- Returns: one row, or none
-- Of an outbox, the steps that told of no event tell the time as well.
-- Clauses: I-32
SELECT seq, ts_ms FROM (
  SELECT * FROM (
    SELECT seq, ts_ms FROM job_journal
    WHERE queue = :queue AND seq <= :seq
    ORDER BY seq DESC LIMIT 1) own
  UNION ALL
  SELECT * FROM (
    SELECT seq, ts_ms FROM job_journal
    WHERE queue = {told_by} AND seq <= :seq
    ORDER BY seq DESC LIMIT 1) steps
) last
ORDER BY seq DESC LIMIT 1
