-- How many wrapped keys are under which key.
-- Returns: a row for each key
-- Clauses: I-42
SELECT storage_creds_kek_id AS kek_id, count(*) AS jobs FROM {jobs}
WHERE storage_creds_kek_id IS NOT NULL GROUP BY storage_creds_kek_id
