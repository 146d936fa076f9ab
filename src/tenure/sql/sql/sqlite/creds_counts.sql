-- How many wrapped keys are under which key: of jobs, and of webhook secrets.
-- Returns: a row for each key
-- Clauses: I-42 I-43
SELECT kek_id, count(*) AS jobs FROM (
  SELECT storage_creds_kek_id AS kek_id FROM {jobs} WHERE storage_creds_kek_id IS NOT NULL
  UNION ALL SELECT kek_id FROM webhook_secrets WHERE kek_id IS NOT NULL) wrapped
GROUP BY kek_id;
