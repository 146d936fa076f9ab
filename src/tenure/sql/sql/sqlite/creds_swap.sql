-- Moves wrapped keys to another key where nothing changed since they were read.
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
