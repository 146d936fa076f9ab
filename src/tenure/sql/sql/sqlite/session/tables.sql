-- Tables of one connection, in memory: what the statements of an operation hand to each other.
CREATE TEMP TABLE head (now_ms, paused, overdue, next_due_ms);
CREATE TEMP TABLE chosen (job_id TEXT PRIMARY KEY, n, was, mark) WITHOUT ROWID;
CREATE TEMP TABLE taking (turn INTEGER PRIMARY KEY, seq, was);
CREATE TEMP TABLE succeeding (n INTEGER PRIMARY KEY, seq, fence, token_h, result, result_h, was,
  lease_was);
CREATE TEMP TABLE entering (n INTEGER PRIMARY KEY, job_id, task, payload, payload_h, priority,
  delay_ms, max_attempts, ttl_ms, gid, requester_id, request_hash, trace, idempotency_key,
  status_webhook_url, refresh_url, credential_version, storage_creds_encrypted,
  storage_creds_dek_wrapped, storage_creds_kek_id, storage_creds_encryption_version);
CREATE TEMP TABLE news (n INTEGER PRIMARY KEY, job_id, type, step, data, progress, was, ver_was,
  becomes, nth);
CREATE TEMP TABLE ending (n INTEGER, job_id TEXT PRIMARY KEY, fence, token_h, verdict, delay_ms,
  result, result_h, error, attempt_error, error_code, outcome_h, was, lease_was, holder, claimed_ms)
  WITHOUT ROWID;
CREATE TEMP TABLE lapsed (job_id TEXT PRIMARY KEY, was, lease_was, holder, claimed_ms, fence,
  cancelled, ends) WITHOUT ROWID;
CREATE TEMP TABLE old (job_id TEXT PRIMARY KEY, seq, created_ms, goes) WITHOUT ROWID;
CREATE TEMP TABLE window_ (seq INTEGER PRIMARY KEY, ts_ms, goes);
CREATE TEMP TABLE spent (caller);
CREATE TEMP TABLE moved (rows);

-- The queues for which this transaction has work, whichever statement or trigger made it: who waits
-- for one of them is woken after the commit. A job that is not due counts: it changes until when.
CREATE TEMP TABLE fed (queue TEXT PRIMARY KEY) WITHOUT ROWID;
-- @for box in inbox_jobs job_outbox_events plane_jobs
CREATE TEMP TRIGGER {box}_fed AFTER INSERT ON main.{box}
BEGIN
  INSERT OR IGNORE INTO fed VALUES (NEW.queue);
END;
CREATE TEMP TRIGGER {box}_fed_again AFTER UPDATE OF status, ready ON main.{box}
WHEN NEW.status = 'queued' AND (NEW.ready > OLD.ready OR OLD.status <> 'queued')
BEGIN
  INSERT OR IGNORE INTO fed VALUES (NEW.queue);
END;
-- @end
CREATE TEMP TRIGGER job_queues_resumed AFTER UPDATE OF paused ON main.job_queues
WHEN OLD.paused AND NOT NEW.paused
BEGIN
  INSERT OR IGNORE INTO fed VALUES (NEW.queue);
END;
