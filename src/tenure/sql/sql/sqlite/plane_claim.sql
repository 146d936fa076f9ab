-- Takes leases for several askers at once, in their order: each gets as many as it asked for, under
-- a token of its own, for as long as the line lasts.
-- Batch: worker_id text, token_h text, count integer
-- Takes: queue text, lease_ms bigint, look boolean, from_priority integer, from_seq bigint
-- Returns: the time, whether the queue is paused, whether something is overdue (then nothing is taken),
--   when the next waiting job is due, and a lease on each row with the number of its asker (one row
--   without a lease if none)
-- Clauses: P-7 P-8 P-9
DELETE FROM temp.head;
INSERT INTO temp.head
SELECT :now_ms, coalesce((SELECT paused FROM job_queues WHERE queue = :queue), 0),
  :look AND (
    EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND lease_expires_at > 0
      AND lease_expires_at < :now_ms AND status IN {running})
    OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND due_ms > 0 AND due_ms <= :now_ms
      AND status = 'queued' AND NOT ready)
    OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND expires_ms > 0
      AND expires_ms <= :now_ms AND status = 'queued')),
  CASE WHEN :look THEN (SELECT due_ms FROM {jobs} WHERE queue = :queue AND due_ms > 0
    AND status = 'queued' AND NOT ready ORDER BY due_ms LIMIT 1) END;
DELETE FROM temp.chosen;
INSERT INTO temp.chosen (job_id, mark)
SELECT job_id, row_number() OVER (ORDER BY priority, seq) FROM (
  SELECT j.job_id, j.priority, j.seq FROM {jobs} j
  WHERE j.queue = :queue AND j.ready AND j.status = 'queued'
    AND NOT EXISTS (SELECT 1 FROM temp.head WHERE paused OR overdue)
  ORDER BY j.priority, j.seq LIMIT (SELECT sum(a.count) FROM {batch} a));
UPDATE temp.chosen SET n = (
  SELECT s.n FROM (SELECT a.n, sum(a.count) OVER (ORDER BY a.n) AS upto FROM {batch} a) s
  WHERE s.upto >= temp.chosen.mark ORDER BY s.upto, s.n LIMIT 1);
UPDATE {jobs} AS j
SET status = 'claimed', passed = '', ready = 0, due_ms = 0, worker_id = a.worker_id,
  lease_token_h = a.token_h, claimed_ms = :now_ms, heartbeat_at = :now_ms,
  lease_expires_at = :now_ms + :lease_ms, claim_version = j.claim_version + 1,
  attempt_count = j.attempt_count + 1, ver = j.ver + 1, updated_ms = :now_ms
FROM temp.chosen c JOIN {batch} a ON a.n = c.n
WHERE j.job_id = c.job_id;
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, lease_until_ms, gid, priority, max_attempts)
SELECT :queue, j.job_id, j.ver, 'claim', :now_ms, j.task, 'queued', 'claimed', j.attempt_count,
  j.claim_version, j.claim_version - 1, j.lease_token_h, j.worker_id, j.lease_expires_at, j.gid,
  j.priority, j.max_attempts
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id ORDER BY j.priority, j.seq;
INSERT INTO job_attempts (job_id, claim_version, queue, attempt, worker_id, claimed_ms, ended_ms,
  verdict, outcome_h)
SELECT j.job_id, j.claim_version, :queue, j.attempt_count, j.worker_id, :now_ms, 0, 'running', ''
FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id{known_attempt};
SELECT h.now_ms, h.paused, h.overdue, coalesce(h.next_due_ms, 0) AS next_due_ms, t.n, t.job_id,
  t.task, t.payload, t.attempt_count, t.max_attempts, t.claim_version, t.lease_expires_at,
  t.created_ms, t.gid, t.priority, t.trace, t.seq
FROM temp.head h
LEFT JOIN (SELECT c.n, j.* FROM temp.chosen c JOIN {jobs} j ON j.job_id = c.job_id) t
ORDER BY t.priority, t.seq;
