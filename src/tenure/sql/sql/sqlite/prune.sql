-- Removes jobs that ended long ago with all that belongs to them; a tombstone answers for each.
-- Takes: queue text, keep_ms bigint, after bigint, count integer
-- Returns: how many went, and the last position that was looked at (0 when all later jobs are young)
-- Clauses: I-23 I-34
DELETE FROM temp.old;
INSERT INTO temp.old
SELECT e.job_id, e.seq, e.ts_ms, j.status IN ('succeeded', 'dead_letter')
  AND j.updated_ms < :now_ms - :keep_ms
  AND NOT EXISTS (SELECT 1 FROM job_outbox_events o WHERE o.gid = j.job_id
    AND o.status NOT IN ('succeeded', 'dead_letter'))
FROM (SELECT job_id, max(seq) AS seq, max(ts_ms) AS ts_ms FROM (SELECT job_id, seq, ts_ms FROM (
      SELECT * FROM (
        SELECT job_id, seq, ts_ms FROM job_journal
        WHERE queue = :queue AND type = 'submit' AND seq > :after
        ORDER BY seq LIMIT :count) own
      UNION ALL
      SELECT * FROM (
        SELECT job_id, seq, ts_ms FROM job_event_submits
        WHERE queue = :queue AND type = 'submit' AND seq > :after
        ORDER BY seq LIMIT :count) steps
    ) ORDER BY seq LIMIT :count) GROUP BY job_id) e
LEFT JOIN {jobs} j ON j.job_id = e.job_id;
INSERT OR IGNORE INTO pruned_jobs (job_id, queue, requester_id, pruned_ms)
SELECT j.job_id, :queue, j.requester_id, :now_ms
FROM temp.old o JOIN {jobs} j ON j.job_id = o.job_id WHERE o.goes;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, attempt, fence,
  prev_fence, data)
SELECT :queue, j.job_id, j.ver + 1, 'remove', :now_ms, j.task, j.status, j.attempt_count,
  j.claim_version, j.claim_version, 'kept long enough'
FROM temp.old o JOIN {jobs} j ON j.job_id = o.job_id WHERE o.goes;
DELETE FROM job_attempts
WHERE queue = :queue AND job_id IN (SELECT job_id FROM temp.old WHERE goes);
DELETE FROM idempotency_keys
WHERE queue = :queue AND job_id IN (SELECT job_id FROM temp.old WHERE goes);
DELETE FROM {jobs} WHERE job_id IN (SELECT job_id FROM temp.old WHERE goes);
SELECT coalesce(sum(goes), 0) AS pruned,
  CASE WHEN count(*) < :count OR max(created_ms) > :now_ms - :keep_ms THEN 0
    ELSE max(seq) END AS last
FROM temp.old;
