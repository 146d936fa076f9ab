-- Begins ended jobs anew: the old row goes and a fresh one takes its id and claim version. It is
-- no transition, since the table has none out of an end.
-- Batch: job_id text
-- Takes: queue text, channel text
-- Returns: for each known job its number and the state that was found
-- Clauses: I-6 I-27
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
found AS MATERIALIZED (
  SELECT a.n, j.job_id, j.status AS was
  FROM (SELECT * FROM {batch}) a JOIN {jobs} j ON j.job_id = a.job_id
  WHERE j.queue = :queue
  ORDER BY j.job_id
  FOR UPDATE OF j
),
gone AS (
  DELETE FROM {jobs} j USING found f
  WHERE j.job_id = f.job_id AND f.was IN ('succeeded', 'dead_letter')
  RETURNING j.*
),
fresh AS (
  INSERT INTO {jobs} (job_id, queue, task, priority, max_attempts, ver, claim_version, event_count,
    created_ms, updated_ms, gid, requester_id, request_hash, trace, status_webhook_url, refresh_url,
    payload, payload_h, credential_version, storage_creds_encrypted, storage_creds_dek_wrapped,
    storage_creds_kek_id, storage_creds_encryption_version)
  SELECT g.job_id, g.queue, g.task, g.priority, g.max_attempts, g.ver + 1, g.claim_version,
    g.event_count, g.created_ms, c.now_ms, g.gid, g.requester_id, g.request_hash, g.trace,
    g.status_webhook_url, g.refresh_url, g.payload, g.payload_h, g.credential_version, g.storage_creds_encrypted,
    g.storage_creds_dek_wrapped, g.storage_creds_kek_id, g.storage_creds_encryption_version
  FROM gone g, clock c
  RETURNING job_id, ver, claim_version, updated_ms
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, fence,
    prev_fence, gid, priority, max_attempts)
  SELECT :queue, f.job_id, f.ver, 'reopen', f.updated_ms, g.task, g.status, 'queued', f.claim_version,
    f.claim_version, g.gid, g.priority, g.max_attempts
  FROM fresh f JOIN gone g ON g.job_id = f.job_id
),
told AS MATERIALIZED (SELECT pg_notify(:channel, :queue) FROM (SELECT 1 FROM fresh LIMIT 1) one)
SELECT n, was FROM found LEFT JOIN told ON true
