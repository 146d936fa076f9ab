-- Removes jobs that ended long ago with all that belongs to them; a tombstone answers for each.
-- Takes: queue text, keep_ms bigint, after bigint, count integer
-- Returns: how many went, and the last position that was looked at (0 when all later jobs are young)
-- The keys of a job are found by the index of jobs, which has the collation of its database.
-- Clauses: I-23 I-34
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
window_ AS MATERIALIZED (
  SELECT job_id, seq, ts_ms AS created_ms FROM (
    SELECT * FROM (
      SELECT job_id, seq, ts_ms FROM job_journal
      WHERE queue = :queue AND type = 'submit' AND seq > :after AND seq <= :after + {span}
      ORDER BY seq LIMIT :count) own
    UNION ALL
    SELECT * FROM (
      SELECT job_id || '.' || told, seq, ts_ms FROM job_journal
      WHERE queue = {told_by} AND told > 0 AND seq > :after AND seq <= :after + {span}
      ORDER BY seq LIMIT :count) steps
  ) pages ORDER BY seq LIMIT :count
),
old AS MATERIALIZED (
  SELECT j.job_id FROM window_ w JOIN {jobs} j ON j.job_id = w.job_id, clock c
  WHERE j.status IN ('succeeded', 'dead_letter') AND j.updated_ms < c.now_ms - :keep_ms
    AND (j.event_count = 0 OR (SELECT e.seq
      FROM generate_series(greatest(1, j.event_count - 1000), j.event_count) nth, job_outbox_events e
      WHERE e.job_id = j.job_id || '.' || nth
        AND (e.status NOT IN ('succeeded', 'dead_letter')) IS TRUE LIMIT 1) IS NULL)
  FOR UPDATE OF j SKIP LOCKED
),
gone AS (
  DELETE FROM {jobs} j USING old o WHERE j.job_id = o.job_id
  RETURNING j.job_id, j.ver, j.task, j.status, j.attempt_count, j.claim_version, j.requester_id
),
attempts AS (
  DELETE FROM job_attempts t USING gone g WHERE t.job_id = g.job_id AND t.queue = :queue
),
keys AS (
  DELETE FROM idempotency_keys k USING gone g
  WHERE k.job_id = g.job_id COLLATE "default" AND k.queue || '' = :queue
),
tombs AS (
  INSERT INTO pruned_jobs (job_id, queue, requester_id, pruned_ms)
  SELECT g.job_id, :queue, g.requester_id, c.now_ms FROM gone g, clock c
  ON CONFLICT (job_id, queue) DO NOTHING
),
noted AS (
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, attempt, fence,
    prev_fence, data)
  SELECT :queue, g.job_id, g.ver + 1, 'remove', c.now_ms, g.task, g.status, g.attempt_count,
    g.claim_version, g.claim_version, 'kept long enough'
  FROM gone g, clock c
)
SELECT (SELECT count(*) FROM gone) AS pruned,
  CASE WHEN max(w.created_ms) > (SELECT now_ms FROM clock) - :keep_ms THEN 0
    WHEN count(*) >= :count THEN max(w.seq)
    WHEN :after + {span} < (SELECT last_value FROM job_journal_seq_seq) THEN :after + {span}
    ELSE 0 END AS last
FROM window_ w
