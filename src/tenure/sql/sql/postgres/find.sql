-- Jobs of a queue from a position of the journal down to another one, newest first.
-- Takes: queue text, before bigint, least bigint, count integer
-- Returns: the position of each submit, with the job's row where there still is one
-- Clauses: I-30
SELECT e.seq AS position, j.job_id, j.queue, j.task, j.status, j.payload, j.result, j.error,
  j.attempt_count, j.max_attempts, j.claim_version, j.created_ms, j.updated_ms, j.due_ms,
  j.lease_expires_at, j.expires_ms, j.priority, j.gid, j.worker_id, j.requester_id, j.progress,
  j.trace, j.cancel_requested, j.lost_count, j.credential_refresh_count, j.event_count,
  j.credential_version, j.status_webhook_url, j.seq
FROM (SELECT seq, job_id, ts_ms FROM (
    SELECT * FROM (
      SELECT seq, job_id, ts_ms FROM job_journal
      WHERE queue = :queue AND type = 'submit' AND seq < :before AND seq >= :least
      ORDER BY seq DESC LIMIT :count) own
    UNION ALL
    SELECT * FROM (
      SELECT seq, job_id || '.' || told, ts_ms FROM job_journal
      WHERE queue = {told_by} AND told > 0 AND seq < :before AND seq >= :least
      ORDER BY seq DESC LIMIT :count) steps
  ) pages ORDER BY seq DESC LIMIT :count) e
LEFT JOIN {jobs} j ON j.job_id = e.job_id AND j.created_ms = e.ts_ms
ORDER BY e.seq DESC
