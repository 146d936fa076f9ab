-- Where the chain of the audit log ends, and how many entries there are.
-- Returns: one row
-- Clauses: I-44
SELECT
  coalesce((SELECT max(number) FROM audit_log), 0) AS number,
  coalesce((SELECT hash FROM audit_log WHERE number IS NOT NULL ORDER BY number DESC LIMIT 1), '') AS hash,
  coalesce((SELECT max(seq) FROM audit_log), 0) AS seq,
  (SELECT count(*) FROM audit_log) AS size
