-- Submitting jobs.

-- name: submit
-- Stores jobs with their idempotency keys and first events.
-- Batch: job_id text, task text, payload text, payload_h text, priority integer, delay_ms bigint
-- Batch: max_attempts integer, ttl_ms bigint, gid text, requester_id text, request_hash text
-- Batch: trace text, idempotency_key text, status_webhook_url text, refresh_url text
-- Batch: credential_version integer, storage_creds_encrypted bytea
-- Batch: storage_creds_dek_wrapped bytea, storage_creds_kek_id text
-- Batch: storage_creds_encryption_version integer
-- Takes: queue text, depth_max bigint, key_ttl_ms bigint, channel text
-- Returns: for each job that was stored its id and the time
-- Clauses: I-1 I-2 I-3 I-4
DELETE FROM temp.entering;
INSERT INTO temp.entering
SELECT a.n, a.job_id, a.task, a.payload, a.payload_h, a.priority, a.delay_ms, a.max_attempts,
  a.ttl_ms, a.gid, a.requester_id, a.request_hash, a.trace, a.idempotency_key,
  a.status_webhook_url, a.refresh_url, a.credential_version, from_base64(a.storage_creds_encrypted),
  from_base64(a.storage_creds_dek_wrapped), a.storage_creds_kek_id, a.storage_creds_encryption_version
FROM {batch} a
WHERE NOT EXISTS (SELECT 1 FROM {jobs} j WHERE j.job_id = a.job_id)
  AND NOT EXISTS (SELECT 1 FROM idempotency_keys k WHERE k.queue = :queue
    AND k.requester_id = a.requester_id AND k.idempotency_key = a.idempotency_key
    AND a.idempotency_key <> '');
DELETE FROM temp.entering WHERE :depth_max > 0 AND n NOT IN (
  SELECT n FROM temp.entering ORDER BY n LIMIT max(0, :depth_max - (
    SELECT count(*) FROM (SELECT 1 FROM {jobs} WHERE queue = :queue
      AND status NOT IN ('succeeded', 'dead_letter') LIMIT :depth_max))));
INSERT INTO idempotency_keys (queue, requester_id, idempotency_key, request_hash, job_id, response,
  created_ms, expires_ms)
SELECT :queue, requester_id, idempotency_key, request_hash, job_id, {response}, :now_ms,
  :now_ms + :key_ttl_ms
FROM temp.entering WHERE idempotency_key <> '';
INSERT INTO {jobs} (job_id, queue, task, payload, payload_h, priority, ready, due_ms, max_attempts, expires_ms,
  gid, requester_id, request_hash, trace, created_ms, updated_ms, status_webhook_url, refresh_url,
  credential_version, storage_creds_encrypted, storage_creds_dek_wrapped, storage_creds_kek_id,
  storage_creds_encryption_version)
SELECT job_id, :queue, task, payload, payload_h, priority, delay_ms = 0,
  CASE WHEN delay_ms > 0 THEN :now_ms + delay_ms ELSE 0 END, max_attempts,
  CASE WHEN ttl_ms > 0 THEN :now_ms + ttl_ms ELSE 0 END, gid, requester_id, request_hash, trace,
  :now_ms, :now_ms, status_webhook_url, refresh_url, credential_version, storage_creds_encrypted,
  storage_creds_dek_wrapped, storage_creds_kek_id, storage_creds_encryption_version
FROM temp.entering ORDER BY n;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, to_state, gid, priority, due_ms,
  max_attempts, payload_h)
SELECT :queue, job_id, 1, 'submit', :now_ms, task, 'queued', gid, priority,
  CASE WHEN delay_ms > 0 THEN :now_ms + delay_ms ELSE 0 END, max_attempts, payload_h
FROM temp.entering ORDER BY n;
SELECT job_id, :now_ms AS created_ms FROM temp.entering;

-- name: lookup
-- The jobs that already have a job id, or an idempotency key of a requester.
-- Batch: job_id text, requester_id text, idempotency_key text
-- Takes: queue text
-- Returns: for each that is known its number, the job's id, the hash of its request, and the response
--   that is stored with the key
-- Clauses: I-2 I-3
SELECT a.n, coalesce(j.job_id, k.job_id) AS job_id,
  coalesce(j.request_hash, k.request_hash) AS request_hash, j.job_id IS NOT NULL AS by_id, k.response
FROM {batch} a
LEFT JOIN {jobs} j ON j.job_id = a.job_id
LEFT JOIN idempotency_keys k ON j.job_id IS NULL AND a.idempotency_key <> '' AND k.queue = :queue
  AND k.requester_id = a.requester_id AND k.idempotency_key = a.idempotency_key
WHERE j.job_id IS NOT NULL OR k.job_id IS NOT NULL;
