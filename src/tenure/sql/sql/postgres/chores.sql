-- Whether upkeep has something to do, looked at without a lock.
-- Takes: queue text
-- Returns: whether a lease ran out, a job is due or past its time; whether a job rests in `failed`;
--   whether an event is held back
-- Clauses: I-10 I-12
SELECT EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status IN {running}
    AND lease_expires_at < c.now_ms)
  OR EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status = 'queued' AND NOT ready
    AND due_ms > 0 AND due_ms <= c.now_ms)
  OR EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status = 'queued' AND expires_ms > 0
    AND expires_ms <= c.now_ms) AS overdue,
  EXISTS (SELECT FROM {jobs} WHERE queue = :queue AND status = 'failed') AS resting,
  {held_back} AS held_back
FROM (SELECT {now} AS now_ms) c
