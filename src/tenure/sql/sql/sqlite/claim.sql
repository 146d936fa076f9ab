-- Takes leases on the jobs whose turn it is: one update, its attempt counted, its event in the journal.
-- Takes: queue text, count integer, lease_ms bigint, worker_id text, token_h text, look boolean
-- Takes: from_priority integer, from_seq bigint, leases_ms bigint, share integer, requester_max integer
-- Returns: the time, whether the queue is paused, whether something is overdue (then nothing is taken),
--   when the next waiting job is due, whether jobs may have been left to others of their requester,
--   and a lease on each row (one row without a lease if none)
-- Clauses: I-7 I-8 I-9 I-12 I-36
DELETE FROM temp.head;
INSERT INTO temp.head
SELECT :now_ms, coalesce((SELECT paused FROM job_queues WHERE queue = :queue), 0),
  :look AND (
    EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND lease_expires_at > 0
      AND lease_expires_at >= :leases_ms AND lease_expires_at < :now_ms AND status IN {running})
    OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND due_ms > 0 AND due_ms <= :now_ms
      AND status = 'queued' AND NOT ready)
    OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND expires_ms > 0
      AND expires_ms <= :now_ms AND status = 'queued')),
  CASE WHEN :look THEN (SELECT due_ms FROM {jobs} WHERE queue = :queue AND due_ms > 0
    AND status = 'queued' AND NOT ready ORDER BY due_ms LIMIT 1) END;
DELETE FROM temp.taking;
INSERT INTO temp.taking (seq, was)
SELECT j.seq, j.status FROM {jobs} j
WHERE j.queue = :queue AND j.ready AND j.status = 'queued' AND {in_turn}
  AND NOT EXISTS (SELECT 1 FROM temp.head WHERE paused OR overdue)
ORDER BY j.priority, j.seq LIMIT :count;
UPDATE {jobs} AS j
SET status = 'claimed', passed = '', ready = 0, due_ms = 0, worker_id = :worker_id,
  lease_token_h = :token_h, claimed_ms = :now_ms, heartbeat_at = :now_ms,
  lease_expires_at = :now_ms + :lease_ms, claim_version = claim_version + 1,
  attempt_count = attempt_count + 1, ver = ver + 1, updated_ms = :now_ms{count_event}
WHERE j.seq IN (SELECT seq FROM temp.taking);
INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, from_state, to_state, attempt, fence,
  prev_fence, token_h, worker_id, lease_until_ms, gid, priority, max_attempts, told)
SELECT :queue, j.job_id, j.ver, 'claim', :now_ms, j.task, 'queued', 'claimed', j.attempt_count,
  j.claim_version, j.claim_version - 1, :token_h, :worker_id, j.lease_expires_at, j.gid, j.priority,
  j.max_attempts, {told}
FROM temp.taking h JOIN {jobs} j ON j.seq = h.seq ORDER BY h.turn;
{tell_taken}
SELECT h.now_ms, h.paused, h.overdue, coalesce(h.next_due_ms, 0) AS next_due_ms,
  :share > 0 AND EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND ready) AS left_some, t.job_id, t.task,
  t.payload, t.attempt_count, t.max_attempts, t.claim_version, t.lease_expires_at, t.created_ms,
  t.gid, t.priority, t.trace, t.seq, t.requester_id, t.status_webhook_url, t.credential_version
FROM temp.head h
LEFT JOIN (SELECT j.*, c.turn FROM temp.taking c JOIN {jobs} j ON j.seq = c.seq) t
ORDER BY t.turn;
