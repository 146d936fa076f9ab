-- Whether upkeep has something to do, looked at without the right to write.
-- Takes: queue text
-- Returns: whether a lease ran out, a job is due or past its time; whether a job rests in `failed`;
--   whether an event is held back
-- Clauses: I-10 I-12
SELECT EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND lease_expires_at > 0
    AND lease_expires_at < :now_ms AND status IN {running})
  OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND due_ms > 0 AND due_ms <= :now_ms
    AND status = 'queued' AND NOT ready)
  OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND expires_ms > 0
    AND expires_ms <= :now_ms AND status = 'queued') AS overdue,
  EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND status = 'failed') AS resting,
  {held_back} AS held_back;
