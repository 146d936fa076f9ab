-- The journal and its readers.

-- name: journal
-- The history of a queue between two positions, oldest first.
-- Takes: queue text, after bigint, upto bigint, count integer
-- Returns: its rows
-- For an outbox, steps without an event are skipped; the caller bounds their number by `upto`.
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
    SELECT seq, queue || '/outbox' AS queue, job_id || '.' || event_number AS job_id, 'submit'::text AS type,
      ts_ms, 1::bigint AS ver, 'webhook'::text AS task, ''::text AS from_state,
      'queued'::text AS to_state, 0 AS attempt, 0::bigint AS fence, 0::bigint AS prev_fence,
      ''::text AS token_h, ''::text AS worker_id, 0::bigint AS lease_until_ms,
      0::bigint AS prev_lease_until_ms, job_id AS gid, 0 AS priority, 0::bigint AS due_ms,
      10 AS max_attempts, ''::text AS error_code, ''::text AS payload_h, ''::text AS result_h,
      ''::text AS data FROM job_journal
    WHERE queue = {inbox_queue} AND event_number > 0 AND seq > :after AND seq <= :upto
    ORDER BY seq LIMIT :count) steps
) pages
ORDER BY seq LIMIT :count

-- name: journal_at
-- The last step of a queue at or before a position, and its time; for a search by time.
-- Takes: queue text, seq bigint
-- Returns: one row, or none
-- For an outbox, steps without an event count too.
-- Clauses: I-32
SELECT seq, ts_ms FROM (
  SELECT * FROM (
    SELECT seq, ts_ms FROM job_journal
    WHERE queue = :queue AND seq <= :seq
    ORDER BY seq DESC LIMIT 1) own
  UNION ALL
  SELECT * FROM (
    SELECT seq, ts_ms FROM job_journal
    WHERE queue = {inbox_queue} AND seq <= :seq
    ORDER BY seq DESC LIMIT 1) steps
) last
ORDER BY seq DESC LIMIT 1

-- name: journal_end
-- The last position that was allocated, whether or not its writer has committed.
-- Returns: one row
-- Clauses: I-32
SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS seq FROM job_journal_seq_seq

-- name: horizon
-- The first transaction that may still be open, and the next one to begin.
-- Returns: one row
-- Clauses: I-32
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS ended,
  pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next

-- name: reader_note
-- Stores how far a reader has captured the journal of a queue.
-- Takes: queue text, name text, position bigint
-- Returns: nothing
-- Clauses: I-24
INSERT INTO journal_readers (queue, name, position, seen_ms)
VALUES (:queue, :name, :position, {now})
ON CONFLICT (queue, name) DO UPDATE SET position = excluded.position, seen_ms = excluded.seen_ms

-- name: reader_forget
-- Removes a reader of a journal.
-- Takes: queue text, name text
-- Returns: its row, or none
-- Clauses: I-24
DELETE FROM journal_readers WHERE queue = :queue AND name = :name RETURNING name

-- name: reader_list
-- The readers of a queue's journal with their positions.
-- Takes: queue text
-- Returns: their rows
-- Clauses: I-24
SELECT name, position, seen_ms FROM journal_readers WHERE queue = :queue ORDER BY name
