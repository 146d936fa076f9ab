-- Begins ended jobs anew: the old row goes and a fresh one takes its id and claim version. It is
-- no transition, since the table has none out of an end.
-- Batch: job_id text
-- Takes: queue text, channel text
-- Returns: for each known job its number and the state that was found
-- Clauses: I-6 I-27
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id, n, was)
SELECT j.job_id, a.n, j.status FROM {batch} a JOIN {jobs} j ON j.job_id = a.job_id
WHERE j.queue = :queue;
INSERT OR REPLACE INTO {jobs} (job_id, queue, task, priority, max_attempts, ver, claim_version,
  event_count, created_ms, updated_ms, gid, requester_id, request_hash, trace, status_webhook_url,
  refresh_url, payload, payload_h, credential_version, storage_creds_encrypted, storage_creds_dek_wrapped,
  storage_creds_kek_id, storage_creds_encryption_version)
SELECT g.job_id, g.queue, g.task, g.priority, g.max_attempts, g.ver + 1, g.claim_version,
  g.event_count, g.created_ms, :now_ms, g.gid, g.requester_id, g.request_hash, g.trace,
  g.status_webhook_url, g.refresh_url, g.payload, g.payload_h, g.credential_version, g.storage_creds_encrypted,
  g.storage_creds_dek_wrapped, g.storage_creds_kek_id, g.storage_creds_encryption_version
FROM temp.chosen c JOIN {jobs} g ON g.job_id = c.job_id
WHERE c.was IN ('succeeded', 'dead_letter');
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, fence,
  prev_fence, gid, priority, max_attempts)
SELECT :queue, j.job_id, j.ver, 'reopen', :now_ms, j.task, c.was, 'queued', j.claim_version,
  j.claim_version, j.gid, j.priority, j.max_attempts
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id
WHERE c.was IN ('succeeded', 'dead_letter');
SELECT n, was FROM temp.chosen;
