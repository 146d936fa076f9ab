-- Moves wrapped keys to another key where nothing changed since they were read.
-- Batch: job_id text, credential_version integer, kek_id text, dek_wrapped bytea, new_kek_id text
-- Batch: new_dek_wrapped bytea
-- Returns: how many
-- Clauses: I-42 I-43
WITH asked AS MATERIALIZED (SELECT * FROM {batch}),
of_jobs AS (
  UPDATE {jobs} j
  SET storage_creds_kek_id = a.new_kek_id, storage_creds_dek_wrapped = a.new_dek_wrapped
  FROM asked a
  WHERE j.job_id = a.job_id AND j.credential_version = a.credential_version
    AND j.storage_creds_kek_id = a.kek_id AND j.storage_creds_dek_wrapped = a.dek_wrapped
  RETURNING 1
),
of_secrets AS (
  UPDATE webhook_secrets s SET kek_id = a.new_kek_id, dek_wrapped = a.new_dek_wrapped
  FROM asked a
  WHERE s.name = a.job_id AND s.kek_id = a.kek_id AND s.dek_wrapped = a.dek_wrapped
  RETURNING 1
)
SELECT (SELECT count(*) FROM of_jobs) + (SELECT count(*) FROM of_secrets) AS changed
