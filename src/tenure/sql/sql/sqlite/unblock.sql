-- Lets events into the line whose earlier events ended while they were being written.
-- Takes: queue text, after bigint, count integer
-- Returns: how many, and the last turn that was looked at (0 when there are no later ones)
-- Clauses: I-22
DELETE FROM temp.old;
INSERT INTO temp.old
SELECT j.job_id, j.seq, 0, (SELECT e.seq FROM {jobs} e WHERE e.gid = j.gid AND e.seq < j.seq
  AND e.status NOT IN ('succeeded', 'dead_letter') LIMIT 1) IS NULL
FROM {jobs} j
WHERE j.queue = :queue AND j.status = 'queued' AND NOT j.ready AND j.due_ms = 0 AND j.seq > :after
ORDER BY j.seq LIMIT :count;
UPDATE {jobs} SET ready = 1 WHERE job_id IN (SELECT job_id FROM temp.old WHERE goes);
SELECT coalesce(sum(goes), 0) AS freed,
  CASE WHEN count(*) < :count THEN 0 ELSE max(seq) END AS last
FROM temp.old;
