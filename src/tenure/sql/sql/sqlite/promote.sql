-- Puts jobs whose time has come into the line, and events whose earlier events have ended.
-- Takes: queue text, count integer, channel text
-- Returns: how many
-- Clauses: I-19 I-22
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id)
SELECT job_id FROM {jobs}
WHERE queue = :queue AND due_ms > 0 AND due_ms <= :now_ms AND status = 'queued' AND NOT ready
ORDER BY due_ms LIMIT :count;
UPDATE {jobs} SET ready = 1 WHERE job_id IN (SELECT job_id FROM temp.chosen);
SELECT count(*) AS promoted FROM temp.chosen;
