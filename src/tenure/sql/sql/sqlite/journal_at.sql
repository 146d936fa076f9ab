-- The last step of a queue at or before a position, and when it was: for a search by time.
-- Takes: queue text, seq bigint
-- Returns: one row, or none
-- Clauses: I-32
SELECT seq, ts_ms FROM (
  SELECT * FROM (
    SELECT seq, ts_ms FROM job_journal
    WHERE queue = :queue AND seq <= :seq
    ORDER BY seq DESC LIMIT 1) own
  UNION ALL
  SELECT * FROM (
    SELECT seq, ts_ms FROM job_event_submits
    WHERE queue = :queue AND seq <= :seq
    ORDER BY seq DESC LIMIT 1) steps
) last
ORDER BY seq DESC LIMIT 1;
