-- The history of a queue between two positions, oldest first.
-- Takes: queue text, after bigint, upto bigint, count integer
-- Returns: its rows
-- Clauses: I-32
SELECT seq, queue, job_id, type, ts_ms, ver, task, from_state, to_state, attempt, fence, prev_fence,
  token_h, worker_id, lease_until_ms, prev_lease_until_ms, gid, priority, due_ms, max_attempts,
  error_code, payload_h, result_h, data
FROM (
  SELECT * FROM (
    SELECT seq, queue, job_id, type, ts_ms, ver, task, from_state, to_state, attempt, fence, prev_fence,
      token_h, worker_id, lease_until_ms, prev_lease_until_ms, gid, priority, due_ms, max_attempts,
      error_code, payload_h, result_h, data FROM job_journal
    WHERE queue = :queue AND seq > :after AND seq <= :upto
    ORDER BY seq LIMIT :count) own
  UNION ALL
  SELECT * FROM (
    SELECT seq, queue, job_id, type, ts_ms, ver, task, from_state, to_state, attempt, fence, prev_fence,
      token_h, worker_id, lease_until_ms, prev_lease_until_ms, gid, priority, due_ms, max_attempts,
      error_code, payload_h, result_h, data FROM job_event_submits
    WHERE queue = :queue AND seq > :after AND seq <= :upto
    ORDER BY seq LIMIT :count) steps
) pages
ORDER BY seq LIMIT :count;
