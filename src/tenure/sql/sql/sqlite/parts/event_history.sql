-- The rows of one event: its own, and that of the step it tells of, which is its submit.
-- The queue is compared as a text that no index has: the rows of a job are few, those of a queue many.
-- Clauses: I-31
(
  SELECT seq, queue || '' AS queue, job_id, ver, type, ts_ms, to_state, attempt, news_type, news_step, news, error_code
  FROM job_journal WHERE job_id = :job_id
  UNION ALL
  SELECT seq, queue || '/' || 'outbox', job_id || '.' || told, 1, 'submit', ts_ms, 'queued', 0, NULL, NULL,
    NULL, ''
  FROM job_journal
  WHERE job_id = substr(rtrim(:job_id, '0123456789'), 1, length(rtrim(:job_id, '0123456789')) - 1)
    AND told > 0
) AS history
