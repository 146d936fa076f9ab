-- Statements that only this engine has.

-- name: peek
-- What a claim would find, read without the write lock: an idle claimer does not block writers.
-- Takes: queue text
-- Returns: the answer of a claim that took nothing, and whether a claim would find work
-- Clauses: I-12
SELECT :now_ms AS now_ms, p.paused, 0 AS overdue, coalesce((SELECT due_ms FROM {jobs}
    WHERE queue = :queue AND due_ms > 0 AND status = 'queued' AND NOT ready
    ORDER BY due_ms LIMIT 1), 0) AS next_due_ms, 0 AS left_by_share, NULL AS job_id,
  NOT p.paused AND (
    EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND ready AND status = 'queued')
    OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND lease_expires_at > 0
      AND lease_expires_at < :now_ms AND status IN {running})
    OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND due_ms > 0 AND due_ms <= :now_ms
      AND status = 'queued' AND NOT ready)
    OR EXISTS (SELECT 1 FROM {jobs} WHERE queue = :queue AND expires_ms > 0
      AND expires_ms <= :now_ms AND status = 'queued')) AS work
FROM (SELECT coalesce((SELECT paused FROM job_queues WHERE queue = :queue), 0) AS paused) p;

-- name: temp_tables
-- Temporary tables of one connection, in which the statements of an operation pass rows to each other.
-- `chosen.mark` is a number that means something else in each operation; its statement says what.
CREATE TEMP TABLE head (now_ms, paused, overdue, next_due_ms);
CREATE TEMP TABLE chosen (job_id TEXT PRIMARY KEY, n, was, mark) WITHOUT ROWID;
CREATE TEMP TABLE weighed (turn INTEGER PRIMARY KEY, job_id, n);
CREATE TEMP TABLE taking (turn INTEGER PRIMARY KEY, seq, was);
CREATE TEMP TABLE entering (n INTEGER PRIMARY KEY, job_id, task, payload, payload_h, priority,
  delay_ms, max_attempts, ttl_ms, gid, requester_id, request_hash, trace, idempotency_key,
  status_webhook_url, refresh_url, credential_version, storage_creds_encrypted,
  storage_creds_dek_wrapped, storage_creds_kek_id, storage_creds_encryption_version);
CREATE TEMP TABLE reports (n INTEGER PRIMARY KEY, job_id, type, step, data, progress, was, ver_was,
  becomes, nth);
CREATE TEMP TABLE ending (n INTEGER PRIMARY KEY, seq, fence, token_h, verdict, delay_ms, result,
  result_h, error, attempt_error, error_code, outcome_h, was, lease_was, holder, claimed_ms);
CREATE TEMP TABLE lapsed (job_id TEXT PRIMARY KEY, was, lease_was, holder, claimed_ms, fence,
  cancelled, ends) WITHOUT ROWID;
CREATE TEMP TABLE old (job_id TEXT PRIMARY KEY, seq, created_ms, goes) WITHOUT ROWID;
CREATE TEMP TABLE window_ (seq INTEGER PRIMARY KEY, ts_ms, goes);
CREATE TEMP TABLE spent (caller);
CREATE TEMP TABLE moved (rows);

-- The queues for which this transaction made work, by any statement or trigger. Their claimers are woken
-- after the commit. A delayed job counts too: it changes how long they wait.
CREATE TEMP TABLE queues_with_work (queue TEXT PRIMARY KEY) WITHOUT ROWID;
-- @for table in inbox_jobs job_outbox_events plane_jobs
CREATE TEMP TRIGGER {table}_fed AFTER INSERT ON main.{table}
BEGIN
  INSERT OR IGNORE INTO queues_with_work VALUES (NEW.queue);
END;
CREATE TEMP TRIGGER {table}_fed_again AFTER UPDATE OF status, ready ON main.{table}
WHEN NEW.status = 'queued' AND (NEW.ready > OLD.ready OR OLD.status <> 'queued')
BEGIN
  INSERT OR IGNORE INTO queues_with_work VALUES (NEW.queue);
END;
-- @end
CREATE TEMP TRIGGER job_queues_resumed AFTER UPDATE OF paused ON main.job_queues
WHEN OLD.paused AND NOT NEW.paused
BEGIN
  INSERT OR IGNORE INTO queues_with_work VALUES (NEW.queue);
END;

-- name: repair_counters
-- Repairs tables whose AUTOINCREMENT or rows another program moved to 2^62 or beyond: at the largest number
-- every insert fails with "database or disk is full". Such rows are renumbered after the others, in order.

UPDATE journal_readers SET position = (SELECT coalesce(max(seq), 0) FROM job_journal WHERE seq < 4611686018427387904)
  + (SELECT count(*) FROM job_journal WHERE seq BETWEEN 4611686018427387904 AND position)
WHERE position >= 4611686018427387904;

-- @for table in inbox_jobs job_outbox_events plane_jobs job_journal audit_log
UPDATE {table} SET seq = moved.place FROM (
  SELECT seq AS wild, row_number() OVER (ORDER BY seq)
    + (SELECT coalesce(max(seq), 0) FROM {table} WHERE seq < 4611686018427387904) AS place
  FROM {table} WHERE seq >= 4611686018427387904) moved
WHERE seq = moved.wild;
UPDATE sqlite_sequence SET seq = (SELECT coalesce(max(seq), 0) FROM {table})
WHERE name = '{table}' AND seq >= 4611686018427387904;
-- @end

UPDATE webhook_secrets SET id = moved.place FROM (
  SELECT id AS wild, row_number() OVER (ORDER BY id)
    + (SELECT coalesce(max(id), 0) FROM webhook_secrets WHERE id < 4611686018427387904) AS place
  FROM webhook_secrets WHERE id >= 4611686018427387904) moved
WHERE id = moved.wild;
UPDATE sqlite_sequence SET seq = (SELECT coalesce(max(id), 0) FROM webhook_secrets)
WHERE name = 'webhook_secrets' AND seq >= 4611686018427387904;
