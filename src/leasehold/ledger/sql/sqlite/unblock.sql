-- Lets events into the line whose earlier events ended while they were being written.
-- Takes: queue text, count integer
-- Returns: how many
-- Clauses: I-22
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id)
SELECT j.job_id FROM {jobs} j
WHERE j.queue = :queue AND j.status NOT IN ('succeeded', 'dead_letter') AND j.status = 'queued'
  AND NOT j.ready AND j.due_ms = 0
  AND NOT EXISTS (SELECT 1 FROM {jobs} e WHERE e.gid = j.gid AND e.seq < j.seq
    AND e.status NOT IN ('succeeded', 'dead_letter'))
LIMIT :count;
UPDATE {jobs} SET ready = 1 WHERE job_id IN (SELECT job_id FROM temp.chosen);
SELECT count(*) AS freed FROM temp.chosen;
