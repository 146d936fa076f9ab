-- Sealed credentials and webhook secrets.

-- name: creds_read
-- The sealed credentials of a job, for the holder of its lease.
-- Takes: job_id text, fence bigint, token_h text
-- Returns: one row while the lease is held
-- Clauses: I-42
SELECT requester_id, credential_version, storage_creds_encrypted, storage_creds_dek_wrapped,
  storage_creds_kek_id, storage_creds_encryption_version, refresh_url, credential_refresh_count
FROM {jobs}
WHERE job_id = :job_id AND claim_version = :fence AND lease_token_h = :token_h AND lease_expires_at > 0;

-- name: creds_replace
-- Replaces the credentials for the holder of the lease, all columns and the version at once.
-- Takes: job_id text, fence bigint, token_h text, seen_version integer, encrypted bytea
-- Takes: dek_wrapped bytea, kek_id text, encryption_version integer
-- Returns: whether the version was still the one that was seen
-- Clauses: I-42
UPDATE {jobs}
SET storage_creds_encrypted = :encrypted, storage_creds_dek_wrapped = :dek_wrapped,
  storage_creds_kek_id = :kek_id, storage_creds_encryption_version = :encryption_version,
  credential_version = credential_version + 1
WHERE job_id = :job_id AND claim_version = :fence AND lease_token_h = :token_h AND lease_expires_at > 0
  AND credential_version = :seen_version;
SELECT changes() AS changed;

-- name: creds_put
-- Replaces the credentials for the requester of an unfinished job.
-- Takes: job_id text, requester_id text, seen_version integer, encrypted bytea
-- Takes: dek_wrapped bytea, kek_id text, encryption_version integer
-- Returns: whether the version was still the one that was seen
-- Clauses: I-42
UPDATE {jobs}
SET storage_creds_encrypted = :encrypted, storage_creds_dek_wrapped = :dek_wrapped,
  storage_creds_kek_id = :kek_id, storage_creds_encryption_version = :encryption_version,
  credential_version = credential_version + 1
WHERE job_id = :job_id AND requester_id = :requester_id AND credential_version = :seen_version
  AND status NOT IN ('succeeded', 'dead_letter');
SELECT changes() AS changed;

-- name: creds_keep
-- Stores whether a queue keeps the sealed credentials of ended jobs.
-- Takes: queue text, kept boolean
-- Returns: nothing
-- Clauses: I-72
INSERT INTO job_queues (queue, keep_credentials) VALUES (:queue, :kept)
ON CONFLICT (queue) DO UPDATE SET keep_credentials = excluded.keep_credentials;

-- name: creds_count
-- Counts a credential refresh of a job, for the holder of its lease.
-- Takes: job_id text, fence bigint, token_h text
-- Returns: the count, in one row while the lease is held
-- Clauses: I-39 I-42
UPDATE {jobs} SET credential_refresh_count = credential_refresh_count + 1
WHERE job_id = :job_id AND claim_version = :fence AND lease_token_h = :token_h AND lease_expires_at > 0;
SELECT credential_refresh_count AS refreshes FROM {jobs} WHERE job_id = :job_id AND claim_version = :fence AND lease_token_h = :token_h AND lease_expires_at > 0;

-- name: creds_page
-- Data keys that are wrapped by another key than this one: of jobs and of webhook secrets, by name.
-- Takes: kek_id text, after text, count integer
-- Returns: their rows, without the encrypted data
-- Clauses: I-42 I-43
SELECT * FROM (
  SELECT * FROM (
    SELECT job_id, requester_id, credential_version, storage_creds_kek_id, storage_creds_dek_wrapped,
      storage_creds_encryption_version
    FROM {jobs}
    WHERE storage_creds_kek_id IS NOT NULL AND storage_creds_kek_id <> :kek_id AND job_id > :after
    ORDER BY job_id LIMIT :count) of_jobs
  UNION ALL
  SELECT * FROM (
    SELECT name, requester_id, 1, kek_id, dek_wrapped, encryption_version FROM webhook_secrets
    WHERE kek_id IS NOT NULL AND kek_id <> :kek_id AND name > :after
    ORDER BY name LIMIT :count) of_secrets
) wrapped
ORDER BY job_id LIMIT :count;

-- name: creds_swap
-- Rewraps data keys, if they have not changed since they were read.
-- Batch: job_id text, credential_version integer, kek_id text, dek_wrapped bytea, new_kek_id text
-- Batch: new_dek_wrapped bytea
-- Returns: how many
-- Clauses: I-42 I-43
DELETE FROM temp.moved;
UPDATE {jobs} AS j
SET storage_creds_kek_id = a.new_kek_id, storage_creds_dek_wrapped = from_base64(a.new_dek_wrapped)
FROM {batch} a
WHERE j.job_id = a.job_id AND j.credential_version = a.credential_version
  AND j.storage_creds_kek_id = a.kek_id AND j.storage_creds_dek_wrapped = from_base64(a.dek_wrapped);
INSERT INTO temp.moved SELECT changes();
UPDATE webhook_secrets AS s SET kek_id = a.new_kek_id, dek_wrapped = from_base64(a.new_dek_wrapped)
FROM {batch} a
WHERE s.name = a.job_id AND s.kek_id = a.kek_id AND s.dek_wrapped = from_base64(a.dek_wrapped);
INSERT INTO temp.moved SELECT changes();
SELECT sum(rows) AS changed FROM temp.moved;

-- name: creds_counts
-- How many data keys each key wraps: of jobs and of webhook secrets.
-- Returns: a row for each key
-- Clauses: I-42 I-43
SELECT kek_id, count(*) AS jobs FROM (
  SELECT storage_creds_kek_id AS kek_id FROM {jobs} WHERE storage_creds_kek_id IS NOT NULL
  UNION ALL SELECT kek_id FROM webhook_secrets WHERE kek_id IS NOT NULL) wrapped
GROUP BY kek_id;

-- name: secret_add
-- Adds a requester's new webhook secret. The newest one before it stays live for a while, so that receivers can
-- switch; older ones are deleted, a bounded number at a time.
-- Takes: requester_id text, name text, encrypted bytea, dek_wrapped bytea, kek_id text
-- Takes: encryption_version integer, overlap_ms bigint
-- Returns: nothing
-- Clauses: I-43
DELETE FROM webhook_secrets WHERE id IN (
  SELECT id FROM webhook_secrets
  WHERE requester_id = :requester_id
    AND id < (SELECT id FROM webhook_secrets WHERE requester_id = :requester_id ORDER BY id DESC LIMIT 1)
  ORDER BY id LIMIT 100);
UPDATE webhook_secrets SET expires_ms = :now_ms + :overlap_ms
WHERE id = (SELECT id FROM webhook_secrets WHERE requester_id = :requester_id ORDER BY id DESC LIMIT 1)
  AND (expires_ms = 0 OR expires_ms > :now_ms + :overlap_ms);
INSERT INTO webhook_secrets (requester_id, name, secret, encrypted, dek_wrapped, kek_id,
  encryption_version, created_ms)
VALUES (:requester_id, :name, '', :encrypted, :dek_wrapped, :kek_id, :encryption_version, :now_ms);

-- name: secret_seal
-- Replaces a plain webhook secret by a sealed one.
-- Takes: name text, encrypted bytea, dek_wrapped bytea, kek_id text, encryption_version integer
-- Returns: nothing
-- Clauses: I-43
UPDATE webhook_secrets SET secret = '', encrypted = :encrypted, dek_wrapped = :dek_wrapped,
  kek_id = :kek_id, encryption_version = :encryption_version
WHERE name = :name AND secret <> '';

-- name: secrets_live
-- The live webhook secrets of a requester, newest first.
-- Takes: requester_id text
-- Returns: their rows; `secret` is empty where it is sealed
-- Clauses: I-43
SELECT name, requester_id, secret, encrypted, dek_wrapped, kek_id, encryption_version
FROM webhook_secrets
WHERE requester_id = :requester_id AND (expires_ms = 0 OR expires_ms > :now_ms)
ORDER BY id DESC LIMIT 2;

-- name: secrets_plain
-- Webhook secrets that are stored unsealed.
-- Takes: count integer
-- Returns: their rows
-- Clauses: I-43
SELECT name, requester_id, secret FROM webhook_secrets WHERE secret <> '' ORDER BY id LIMIT :count;
