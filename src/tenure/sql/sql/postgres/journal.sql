-- The history of a queue between two positions, oldest first.
-- Takes: queue text, after bigint, upto bigint, count integer
-- Returns: its rows
-- Of an outbox the steps are passed over that told of no event: whoever asks says for how many, by `upto`.
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
    SELECT seq, queue || '/outbox' AS queue, job_id || '.' || told AS job_id, 'submit'::text AS type,
      ts_ms, 1::bigint AS ver, 'webhook'::text AS task, ''::text AS from_state,
      'queued'::text AS to_state, 0 AS attempt, 0::bigint AS fence, 0::bigint AS prev_fence,
      ''::text AS token_h, ''::text AS worker_id, 0::bigint AS lease_until_ms,
      0::bigint AS prev_lease_until_ms, job_id AS gid, 0 AS priority, 0::bigint AS due_ms,
      10 AS max_attempts, ''::text AS error_code, ''::text AS payload_h, ''::text AS result_h,
      ''::text AS data FROM job_journal
    WHERE queue = {told_by} AND told > 0 AND seq > :after AND seq <= :upto
    ORDER BY seq LIMIT :count) steps
) pages
ORDER BY seq LIMIT :count
