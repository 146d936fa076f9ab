-- The events of the jobs that a statement moved: rows of `{moved}`. They wait behind earlier ones.
-- Clauses: I-36 I-37
,
told AS (
  INSERT INTO job_outbox_events (job_id, queue, task, gid, requester_id, max_attempts, ready,
    created_ms, updated_ms, status_webhook_url, trace, payload)
  SELECT m.job_id || '.' || m.event_count, :queue || '/outbox', 'webhook', m.job_id, m.requester_id,
    10, {first_of_job},
    m.updated_ms, m.updated_ms, m.status_webhook_url, m.trace,
    event_body(m.job_id, m.event_count, m.status, m.was, m.task, m.attempt_count, m.max_attempts,
      m.updated_ms, m.result, m.error, m.progress)
  FROM {moved} m
  WHERE m.status_webhook_url IS NOT NULL AND m.status <> m.was
  ON CONFLICT (job_id) DO NOTHING
)
