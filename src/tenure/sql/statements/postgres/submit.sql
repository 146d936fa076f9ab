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
-- Lookups are scalar subqueries with LIMIT 1. The planner may turn NOT EXISTS into a join that reads all
-- keys while the statistics still say that there are few.
-- Returns: for each job that was stored its id and the time
-- Clauses: I-1 I-2 I-3 I-4
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
requested AS MATERIALIZED (SELECT given.* FROM clock, {batch}),
room AS MATERIALIZED (
  SELECT CASE WHEN :depth_max = 0 THEN 9223372036854775807 ELSE :depth_max - (
    SELECT count(*) FROM (
      (SELECT 1 FROM {jobs} WHERE queue = :queue AND status = 'queued' LIMIT :depth_max)
      UNION ALL
      (SELECT 1 FROM {jobs} WHERE queue = :queue AND status IN {running} LIMIT :depth_max)) unfinished
  ) END AS places FROM clock
),
fitting AS MATERIALIZED (
  SELECT * FROM (
    SELECT a.*, row_number() OVER (ORDER BY a.n) AS place FROM requested a
    WHERE (SELECT j.job_id FROM {jobs} j WHERE j.job_id = a.job_id LIMIT 1) IS NULL
      AND (a.idempotency_key = '' OR (SELECT k.job_id FROM idempotency_keys k
        WHERE k.queue = :queue AND k.requester_id = a.requester_id
          AND k.idempotency_key = a.idempotency_key LIMIT 1) IS NULL)
  ) numbered
  WHERE place <= (SELECT places FROM room)
),
named AS (
  INSERT INTO idempotency_keys (queue, requester_id, idempotency_key, request_hash, job_id,
    response, created_ms, expires_ms)
  SELECT :queue, f.requester_id, f.idempotency_key, f.request_hash, f.job_id, {response}, c.now_ms,
    c.now_ms + :key_ttl_ms
  FROM fitting f, clock c
  WHERE f.idempotency_key <> ''
  ORDER BY f.requester_id, f.idempotency_key
  ON CONFLICT DO NOTHING
  RETURNING job_id
),
stored AS (
  INSERT INTO {jobs} (job_id, queue, task, payload, payload_h, priority, ready, due_ms, max_attempts,
    expires_ms, gid, requester_id, request_hash, trace, created_ms, updated_ms, status_webhook_url,
    refresh_url, credential_version, storage_creds_encrypted, storage_creds_dek_wrapped,
    storage_creds_kek_id, storage_creds_encryption_version)
  SELECT f.job_id, :queue, f.task, f.payload, f.payload_h, f.priority, f.delay_ms = 0,
    CASE WHEN f.delay_ms > 0 THEN c.now_ms + f.delay_ms ELSE 0 END, f.max_attempts,
    CASE WHEN f.ttl_ms > 0 THEN c.now_ms + f.ttl_ms ELSE 0 END, f.gid, f.requester_id,
    f.request_hash, f.trace, c.now_ms, c.now_ms, f.status_webhook_url, f.refresh_url,
    f.credential_version, f.storage_creds_encrypted, f.storage_creds_dek_wrapped,
    f.storage_creds_kek_id, f.storage_creds_encryption_version
  FROM fitting f, clock c
  WHERE f.idempotency_key = '' OR f.job_id IN (SELECT job_id FROM named)
  ORDER BY f.n
  ON CONFLICT (job_id) DO NOTHING
  RETURNING job_id, due_ms, created_ms, task, gid, priority, max_attempts, payload_h
),
journaled AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, to_state, gid, priority, due_ms,
    max_attempts, payload_h, listed)
  SELECT :queue, job_id, 1, 'submit', created_ms, task, 'queued', gid, priority, due_ms,
    max_attempts, payload_h, false
  FROM stored
),
notified AS MATERIALIZED (
  SELECT pg_notify(:channel, :queue) FROM (SELECT 1 FROM stored LIMIT 1) one
)
SELECT s.job_id, s.created_ms FROM stored s LEFT JOIN notified ON true

-- name: lookup
-- The jobs that already have a job id, or an idempotency key of a requester.
-- Batch: job_id text, requester_id text, idempotency_key text
-- Takes: queue text
-- Returns: for each that is known its number, the job's id, the hash of its request, and the response
--   that is stored with the key
-- Clauses: I-2 I-3
SELECT a.n, coalesce(j.job_id, k.job_id) AS job_id, coalesce(j.request_hash, k.request_hash) AS request_hash,
  j.job_id IS NOT NULL AS by_id, k.response
FROM (SELECT * FROM {batch}) a
LEFT JOIN LATERAL (SELECT job_id, request_hash FROM {jobs} WHERE job_id = a.job_id LIMIT 1) j ON true
LEFT JOIN LATERAL (SELECT job_id, request_hash, response FROM idempotency_keys WHERE queue = :queue
  AND requester_id = a.requester_id AND idempotency_key = a.idempotency_key LIMIT 1) k
  ON j.job_id IS NULL AND a.idempotency_key <> ''
WHERE j.job_id IS NOT NULL OR k.job_id IS NOT NULL
