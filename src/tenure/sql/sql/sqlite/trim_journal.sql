-- Forgets the oldest journal rows, but the submit of a job or event that is still there: it lists it; and
-- what a reader has not kept elsewhere, until that is older than `unread_ms`.
-- Takes: queue text, journal_ms bigint, unread_ms bigint, after bigint, count integer
-- Returns: how many went, and the last position that was looked at (0 when all later rows stay)
-- Clauses: I-24
DELETE FROM temp.window_;
INSERT INTO temp.window_
SELECT seq, ts_ms, ts_ms < :now_ms - :journal_ms
  AND (ts_ms < :now_ms - :unread_ms OR NOT EXISTS (SELECT 1 FROM journal_readers r
    WHERE r.position < job_journal.seq
      AND (r.queue = :queue OR (told > 0 AND r.queue = :queue || '/outbox'))))
  AND NOT (type = 'submit' AND EXISTS (SELECT 1 FROM {jobs} j WHERE j.job_id = job_journal.job_id))
  AND NOT (told > 0 AND EXISTS (SELECT 1 FROM job_outbox_events e
    WHERE e.job_id = job_journal.job_id || '.' || told))
FROM job_journal WHERE queue = :queue AND seq > :after ORDER BY seq LIMIT :count;
DELETE FROM job_journal WHERE seq IN (SELECT seq FROM temp.window_ WHERE goes);
SELECT coalesce(sum(goes), 0) AS trimmed,
  CASE WHEN count(*) < :count OR max(ts_ms) > :now_ms - :journal_ms THEN 0
    WHEN max(ts_ms) > :now_ms - :unread_ms AND max(seq)
      > (SELECT min(r.position) FROM journal_readers r WHERE r.queue = :queue) THEN 0
    ELSE max(seq) END AS last
FROM temp.window_;
