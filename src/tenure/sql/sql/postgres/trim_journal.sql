-- Forgets the oldest journal rows, but the submit of a job or event that is still there: it lists it; and
-- what a reader has not kept elsewhere, until that is older than `unread_ms`.
-- Takes: queue text, journal_ms bigint, unread_ms bigint, after bigint, count integer
-- Returns: how many went, and the last position that was looked at (0 when all later rows stay)
-- Clauses: I-24
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
readers AS MATERIALIZED (
  SELECT queue, min(position) AS position FROM journal_readers
  WHERE queue IN (:queue, :queue || '/outbox') GROUP BY queue
),
window_ AS MATERIALIZED (
  SELECT seq, job_id, type, ts_ms, told FROM job_journal
  WHERE queue = :queue AND seq > :after ORDER BY seq LIMIT :count
),
trimmed AS (
  DELETE FROM job_journal n USING window_ w, clock c
  WHERE n.queue = :queue AND n.seq = w.seq AND w.ts_ms < c.now_ms - :journal_ms
    AND (w.ts_ms < c.now_ms - :unread_ms OR (SELECT r.position FROM readers r
      WHERE r.position < w.seq AND (r.queue = :queue OR w.told > 0) LIMIT 1) IS NULL)
    AND (w.type <> 'submit' OR (SELECT j.seq FROM {jobs} j WHERE j.job_id = w.job_id LIMIT 1) IS NULL)
    AND (w.told = 0 OR (SELECT e.seq FROM job_outbox_events e
      WHERE e.job_id = w.job_id || '.' || w.told LIMIT 1) IS NULL)
  RETURNING n.seq
)
SELECT (SELECT count(*) FROM trimmed) AS trimmed,
  CASE WHEN count(*) < :count OR max(w.ts_ms) > (SELECT now_ms FROM clock) - :journal_ms THEN 0
    WHEN max(w.ts_ms) > (SELECT now_ms FROM clock) - :unread_ms
      AND max(w.seq) > (SELECT r.position FROM readers r WHERE r.queue = :queue) THEN 0
    ELSE max(w.seq) END AS last
FROM window_ w
