-- The journal and its readers.

-- name: journal
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

-- name: journal_at
-- The last step of a queue at or before a position, and its time; for a search by time.
-- Takes: queue text, seq bigint
-- Returns: one row, or none
-- Clauses: I-32
SELECT seq, ts_ms FROM (
  SELECT * FROM (
    SELECT seq, ts_ms FROM job_journal
    WHERE queue = :queue AND seq <= :seq
    ORDER BY seq DESC LIMIT 1) own
  UNION ALL
  SELECT * FROM (
    SELECT seq, ts_ms FROM job_event_submits
    WHERE queue = :queue AND seq <= :seq
    ORDER BY seq DESC LIMIT 1) steps
) last
ORDER BY seq DESC LIMIT 1;

-- name: journal_end
-- The last position that was allocated, whether or not its writer has committed.
-- Returns: one row
-- Clauses: I-32
SELECT coalesce(max(seq), 0) AS seq FROM job_journal;

-- name: horizon
-- The first transaction that may still be open, and the next one to begin.
-- Returns: one row
-- Clauses: I-32
SELECT 1 AS ended, 1 AS next;

-- name: reader_note
-- Stores how far a reader has captured the journal of a queue.
-- Takes: queue text, name text, position bigint
-- Returns: nothing
-- Clauses: I-24
INSERT INTO journal_readers (queue, name, position, seen_ms) VALUES (:queue, :name, :position, :now_ms)
ON CONFLICT (queue, name) DO UPDATE SET position = excluded.position, seen_ms = excluded.seen_ms;

-- name: reader_forget
-- Removes a reader of a journal.
-- Takes: queue text, name text
-- Returns: its row, or none
-- Clauses: I-24
DELETE FROM journal_readers WHERE queue = :queue AND name = :name RETURNING name;

-- name: reader_list
-- The readers of a queue's journal with their positions.
-- Takes: queue text
-- Returns: their rows
-- Clauses: I-24
SELECT name, position, seen_ms FROM journal_readers WHERE queue = :queue ORDER BY name;
