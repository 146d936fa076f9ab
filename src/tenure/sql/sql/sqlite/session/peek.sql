-- What a claim would find, looked at without the right to write: a line that is empty costs nobody.
-- Takes: queue text
-- Returns: the answer of a claim that took nothing, and whether a claim would find something to do
-- Clauses: I-12
SELECT :now_ms AS now_ms, p.paused, 0 AS overdue, coalesce((SELECT due_ms FROM {jobs}
    WHERE queue = :queue AND due_ms > 0 AND status = 'queued' AND NOT ready
    ORDER BY due_ms LIMIT 1), 0) AS next_due_ms, 0 AS left_some, NULL AS job_id,
  NOT p.paused AND (
    EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND ready AND status = 'queued')
    OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND lease_expires_at > 0
      AND lease_expires_at < :now_ms AND status IN {running})
    OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND due_ms > 0 AND due_ms <= :now_ms
      AND status = 'queued' AND NOT ready)
    OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND expires_ms > 0
      AND expires_ms <= :now_ms AND status = 'queued')) AS work
FROM (SELECT coalesce((SELECT paused FROM job_queues WHERE queue = :queue), 0) AS paused) p;
