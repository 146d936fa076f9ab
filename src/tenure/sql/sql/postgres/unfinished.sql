-- How many jobs of one requester have not ended, counted up to a number.
-- Takes: queue text, requester text, most integer
-- Returns: the number
-- Clauses: I-25
SELECT count(*) AS jobs FROM (
  SELECT 1 FROM {jobs} WHERE queue = :queue AND ready AND requester_id = :requester
  UNION ALL
  SELECT 1 FROM {jobs} WHERE queue = :queue AND status = 'queued' AND NOT ready AND due_ms > 0
    AND requester_id = :requester
  UNION ALL
  SELECT 1 FROM {jobs} WHERE queue = :queue AND status IN {running} AND lease_expires_at > 0
    AND requester_id = :requester
  LIMIT :most) unfinished
