-- The events of the jobs that were just moved: rows of `{moved}`. They wait behind earlier ones.
-- Clauses: I-36 I-37
INSERT INTO job_outbox_events (job_id, queue, task, gid, requester_id, max_attempts, ready,
  created_ms, updated_ms, status_webhook_url, trace, payload)
SELECT j.job_id || '.' || j.event_count, :queue || '/outbox', 'webhook', j.job_id, j.requester_id, 10,
  j.event_count = 1 OR NOT EXISTS (SELECT 1 FROM job_outbox_events e
    WHERE e.gid = j.job_id AND e.status NOT IN ('succeeded', 'dead_letter')),
  j.updated_ms, j.updated_ms, j.status_webhook_url, j.trace,
  '{"event_id":' || json_quote(j.job_id || '.' || j.event_count) || ',"job_id":'
  || json_quote(j.job_id) || ',"seq":' || j.event_count || ',"status":"' || j.status
  || '","previous_status":"' || h.was || '","task":' || json_quote(j.task)
  || ',"attempt":' || j.attempt_count || ',"max_attempts":' || j.max_attempts
  || ',"occurred_ms":' || j.updated_ms
  || CASE WHEN j.status = 'succeeded'
      THEN ',"outputs":' || coalesce(nullif(j.result, ''), 'null')
    WHEN j.status IN ('failed', 'dead_letter')
      THEN ',"error":' || coalesce(nullif(j.error, ''), 'null')
    WHEN j.progress <> '' THEN ',"progress":' || j.progress ELSE '' END || '}'
FROM {moved} h JOIN inbox_jobs j ON j.{key} = h.{key}
WHERE j.status_webhook_url IS NOT NULL ORDER BY h.{order}
ON CONFLICT (job_id) DO NOTHING;
