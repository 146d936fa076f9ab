-- Where the chain of the audit log ends, and how many entries there are: at the largest number whose next
-- one is free, so that a number at the end of the range does not end the log.
-- Returns: one row
-- Clauses: I-44
WITH head AS (
  SELECT number, hash FROM audit_log entry WHERE number BETWEEN 1 AND 4611686018427387903
  AND NOT EXISTS (SELECT 1 FROM audit_log taken WHERE taken.number = entry.number + 1)
  ORDER BY number DESC LIMIT 1
)
SELECT
  coalesce((SELECT number FROM head), 0) AS number,
  coalesce((SELECT hash FROM head), '') AS hash,
  coalesce((SELECT max(seq) FROM audit_log), 0) AS seq,
  (SELECT count(*) FROM audit_log) AS size
