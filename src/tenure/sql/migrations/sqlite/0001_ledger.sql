-- The schema of the SQL queues on SQLite: tables, and the rules that hold for every writer.
--
-- The same tables, columns and rules as on PostgreSQL, whose schema file explains them. `seq` is the rowid.

CREATE TABLE job_queues (
  queue TEXT PRIMARY KEY,
  paused INTEGER NOT NULL DEFAULT 0,
  keep_credentials INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

-- @for table in inbox_jobs job_outbox_events plane_jobs
CREATE TABLE {table} (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  job_id TEXT NOT NULL UNIQUE,
  queue TEXT NOT NULL,
  task TEXT NOT NULL,
  status TEXT NOT NULL DEFAULT 'queued' CHECK (status IN ('queued', 'claimed', 'fetching',
    'processing', 'uploading', 'succeeded', 'failed', 'dead_letter')),
  passed TEXT NOT NULL DEFAULT '',
  ready INTEGER NOT NULL DEFAULT 1,
  cancel_requested INTEGER NOT NULL DEFAULT 0,
  priority INTEGER NOT NULL DEFAULT 0,
  attempt_count INTEGER NOT NULL DEFAULT 0,
  max_attempts INTEGER NOT NULL,
  lost_count INTEGER NOT NULL DEFAULT 0,
  credential_refresh_count INTEGER NOT NULL DEFAULT 0,
  event_count INTEGER NOT NULL DEFAULT 0,
  ver INTEGER NOT NULL DEFAULT 1,
  claim_version INTEGER NOT NULL DEFAULT 0,
  due_ms INTEGER NOT NULL DEFAULT 0,
  claimed_ms INTEGER NOT NULL DEFAULT 0,
  heartbeat_at INTEGER NOT NULL DEFAULT 0,
  lease_expires_at INTEGER NOT NULL DEFAULT 0,
  created_ms INTEGER NOT NULL,
  updated_ms INTEGER NOT NULL,
  expires_ms INTEGER NOT NULL DEFAULT 0,
  worker_id TEXT NOT NULL DEFAULT '',
  lease_token_h TEXT NOT NULL DEFAULT '',
  gid TEXT NOT NULL DEFAULT '',
  requester_id TEXT NOT NULL DEFAULT '',
  request_hash TEXT NOT NULL DEFAULT '',
  trace TEXT NOT NULL DEFAULT '',
  status_webhook_url TEXT,
  refresh_url TEXT,
  payload TEXT NOT NULL,
  payload_h TEXT NOT NULL DEFAULT '',
  result TEXT NOT NULL DEFAULT '',
  error TEXT NOT NULL DEFAULT '',
  progress TEXT NOT NULL DEFAULT '',
  credential_version INTEGER NOT NULL DEFAULT 0,
  storage_creds_encrypted BLOB,
  storage_creds_dek_wrapped BLOB,
  storage_creds_kek_id TEXT,
  storage_creds_encryption_version INTEGER,
  CONSTRAINT only_queued_jobs_are_ready CHECK (NOT ready OR status = 'queued'),
  CONSTRAINT running_jobs_have_a_lease CHECK (
    (status IN ('claimed', 'fetching', 'processing', 'uploading')) = (lease_expires_at > 0))
) STRICT;

CREATE INDEX {table}_in_line ON {table} (queue, priority, seq) WHERE ready;
CREATE INDEX {table}_not_due ON {table} (queue, due_ms) WHERE due_ms > 0;
CREATE INDEX {table}_leased ON {table} (queue, lease_expires_at) WHERE lease_expires_at > 0;
CREATE INDEX {table}_mortal ON {table} (queue, expires_ms) WHERE expires_ms > 0;
CREATE INDEX {table}_resting ON {table} (queue) WHERE status = 'failed';

CREATE TRIGGER {table}_begin BEFORE INSERT ON {table}
WHEN NEW.status <> 'queued'
BEGIN
  SELECT RAISE(ABORT, 'transition: a new job is queued');
END;

-- The transition table of the contract. The two most frequent steps are tested first.
CREATE TRIGGER {table}_step BEFORE UPDATE OF status, passed, claim_version ON {table}
WHEN (OLD.status <> NEW.status
    AND NOT (OLD.status = 'queued' AND NEW.status = 'claimed')
    AND NOT (OLD.status = 'claimed' AND NEW.status = 'succeeded'
      AND NEW.passed = 'fetching>processing>uploading>')
    AND CASE OLD.status || '>' || NEW.status
      WHEN 'claimed>fetching' THEN 0 WHEN 'fetching>processing' THEN 0
      WHEN 'processing>uploading' THEN 0 WHEN 'uploading>succeeded' THEN 0
      WHEN 'claimed>queued' THEN 0 WHEN 'fetching>queued' THEN 0 WHEN 'processing>queued' THEN 0
      WHEN 'uploading>queued' THEN 0 WHEN 'claimed>failed' THEN 0 WHEN 'fetching>failed' THEN 0
      WHEN 'processing>failed' THEN 0 WHEN 'uploading>failed' THEN 0 WHEN 'failed>queued' THEN 0
      WHEN 'failed>dead_letter' THEN 0 ELSE 1 END
    AND CASE OLD.status || '>' || NEW.passed || NEW.status
      WHEN 'fetching>processing>uploading>succeeded' THEN 0
      WHEN 'processing>uploading>succeeded' THEN 0 WHEN 'claimed>fetching>processing' THEN 0
      WHEN 'claimed>fetching>processing>uploading' THEN 0
      WHEN 'fetching>processing>uploading' THEN 0 WHEN 'queued>claimed>failed' THEN 0
      ELSE 1 END)
  OR (NEW.status = 'claimed' AND NEW.passed <> '')
  OR NEW.claim_version <> OLD.claim_version
    + (CASE WHEN OLD.status = 'queued' AND NEW.status = 'claimed' THEN 1 ELSE 0 END)
  OR (OLD.status = 'failed' AND NEW.status = 'queued' AND OLD.attempt_count >= OLD.max_attempts)
BEGIN
  SELECT RAISE(ABORT, 'transition: the table has no such step');
END;

-- Bounds for numbers: see the schema of PostgreSQL.
CREATE TRIGGER {table}_bounds_begin BEFORE INSERT ON {table}
WHEN NEW.attempt_count NOT BETWEEN 0 AND 2000000000
  OR NEW.lost_count NOT BETWEEN 0 AND 2000000000
  OR NEW.event_count NOT BETWEEN 0 AND 200000
  OR NEW.ver NOT BETWEEN 0 AND 2305843009213693952
  OR NEW.claim_version NOT BETWEEN 0 AND 2305843009213693952
  OR NEW.due_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.claimed_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.heartbeat_at NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.lease_expires_at NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.created_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.updated_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.expires_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
BEGIN
  SELECT RAISE(ABORT, 'constraint: numbers_within_bounds');
END;
CREATE TRIGGER {table}_bounds_step BEFORE UPDATE OF attempt_count, lost_count, event_count, ver, due_ms, claimed_ms,
  heartbeat_at, lease_expires_at, created_ms, updated_ms, expires_ms ON {table}
WHEN NEW.event_count < OLD.event_count
  OR NEW.attempt_count < 0 OR (NEW.attempt_count > 1000000000 AND NEW.attempt_count > OLD.attempt_count + 1)
  OR NEW.lost_count < 0 OR (NEW.lost_count > 1000000000 AND NEW.lost_count > OLD.lost_count + 1)
  OR NEW.event_count < 0 OR (NEW.event_count > 100000 AND NEW.event_count > OLD.event_count + 1)
  OR NEW.ver < 0 OR (NEW.ver > 1152921504606846976 AND NEW.ver > OLD.ver + 1)
  OR NEW.due_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.claimed_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.heartbeat_at NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.lease_expires_at NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.created_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.updated_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
  OR NEW.expires_ms NOT BETWEEN -1152921504606846976 AND 1152921504606846976
BEGIN
  SELECT RAISE(ABORT, 'constraint: numbers_within_bounds');
END;

-- A job id is printable ASCII: a statement could not name a job whose id holds other bytes.
CREATE TRIGGER {table}_id_begin BEFORE INSERT ON {table}
WHEN NEW.job_id GLOB '*[^ -~]*' OR length(NEW.job_id) <> length(CAST(NEW.job_id AS BLOB))
BEGIN
  SELECT RAISE(ABORT, 'constraint: job_id_is_printable_ascii');
END;
CREATE TRIGGER {table}_id_step BEFORE UPDATE OF job_id ON {table}
WHEN NEW.job_id GLOB '*[^ -~]*' OR length(NEW.job_id) <> length(CAST(NEW.job_id AS BLOB))
BEGIN
  SELECT RAISE(ABORT, 'constraint: job_id_is_printable_ascii');
END;
-- @end

-- Only jobs of the inbox have credentials.
CREATE INDEX inbox_jobs_sealed ON inbox_jobs (job_id) WHERE storage_creds_kek_id IS NOT NULL;
CREATE INDEX job_outbox_events_held_back ON job_outbox_events (queue, seq)
  WHERE status = 'queued' AND NOT ready AND due_ms = 0;
CREATE INDEX job_outbox_events_of_job ON job_outbox_events (gid, seq)
  WHERE status NOT IN ('succeeded', 'dead_letter');

CREATE TABLE job_journal (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  queue TEXT NOT NULL,
  job_id TEXT NOT NULL,
  ver INTEGER NOT NULL DEFAULT 0,
  type TEXT NOT NULL,
  ts_ms INTEGER NOT NULL,
  fence INTEGER NOT NULL DEFAULT 0,
  prev_fence INTEGER NOT NULL DEFAULT 0,
  lease_until_ms INTEGER NOT NULL DEFAULT 0,
  prev_lease_until_ms INTEGER NOT NULL DEFAULT 0,
  due_ms INTEGER NOT NULL DEFAULT 0,
  attempt INTEGER NOT NULL DEFAULT 0,
  max_attempts INTEGER NOT NULL DEFAULT 0,
  priority INTEGER NOT NULL DEFAULT 0,
  task TEXT NOT NULL DEFAULT '',
  from_state TEXT NOT NULL DEFAULT '',
  to_state TEXT NOT NULL DEFAULT '',
  token_h TEXT NOT NULL DEFAULT '',
  worker_id TEXT NOT NULL DEFAULT '',
  gid TEXT NOT NULL DEFAULT '',
  error_code TEXT NOT NULL DEFAULT '',
  payload_h TEXT NOT NULL DEFAULT '',
  result_h TEXT NOT NULL DEFAULT '',
  data TEXT NOT NULL DEFAULT '',
  news_type TEXT,
  news_step TEXT,
  news TEXT,
  event_number INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX job_journal_of_queue ON job_journal (queue, seq);
CREATE INDEX job_journal_of_job ON job_journal (job_id, ver);
-- Lists jobs by age. An index of the job table itself would be written with every step of every job.
CREATE INDEX job_journal_submits ON job_journal (queue, seq) WHERE type = 'submit';
CREATE INDEX job_journal_events ON job_journal (queue || '/outbox', seq) WHERE event_number > 0;

-- The submits of events, read from the steps that they report.
CREATE VIEW job_event_submits AS
SELECT seq, queue || '/outbox' AS queue, job_id || '.' || event_number AS job_id, 1 AS ver, 'submit' AS type, ts_ms,
  0 AS fence, 0 AS prev_fence, 0 AS lease_until_ms, 0 AS prev_lease_until_ms, 0 AS due_ms,
  0 AS attempt, 10 AS max_attempts, 0 AS priority, 'webhook' AS task, '' AS from_state,
  'queued' AS to_state, '' AS token_h, '' AS worker_id, job_id AS gid, '' AS error_code,
  '' AS payload_h, '' AS result_h, '' AS data, NULL AS news_type, NULL AS news_step, NULL AS news
FROM job_journal WHERE event_number > 0;

-- The history of outboxes, for readers in bulk.
CREATE VIEW job_outbox_journal AS
SELECT seq, queue, job_id, ver, type, ts_ms, fence, prev_fence, lease_until_ms, prev_lease_until_ms,
  due_ms, attempt, max_attempts, priority, task, from_state, to_state, token_h, worker_id, gid,
  error_code, payload_h, result_h, data, news_type, news_step, news
FROM job_journal
UNION ALL
SELECT seq, queue, job_id, ver, type, ts_ms, fence, prev_fence, lease_until_ms, prev_lease_until_ms,
  due_ms, attempt, max_attempts, priority, task, from_state, to_state, token_h, worker_id, gid,
  error_code, payload_h, result_h, data, news_type, news_step, news
FROM job_event_submits;

CREATE TABLE journal_readers (
  queue TEXT NOT NULL,
  name TEXT NOT NULL,
  position INTEGER NOT NULL,
  seen_ms INTEGER NOT NULL,
  PRIMARY KEY (queue, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE job_attempts (
  job_id TEXT NOT NULL,
  claim_version INTEGER NOT NULL,
  queue TEXT NOT NULL,
  attempt INTEGER NOT NULL,
  worker_id TEXT NOT NULL,
  claimed_ms INTEGER NOT NULL,
  ended_ms INTEGER NOT NULL,
  verdict TEXT NOT NULL,
  outcome_h TEXT NOT NULL,
  error_code TEXT NOT NULL DEFAULT '',
  error TEXT NOT NULL DEFAULT '',
  due_ms INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (job_id, claim_version, queue)
) STRICT, WITHOUT ROWID;

CREATE TABLE idempotency_keys (
  queue TEXT NOT NULL,
  requester_id TEXT NOT NULL,
  idempotency_key TEXT NOT NULL,
  request_hash TEXT NOT NULL,
  job_id TEXT NOT NULL,
  response TEXT NOT NULL DEFAULT '',
  created_ms INTEGER NOT NULL,
  expires_ms INTEGER NOT NULL,
  PRIMARY KEY (queue, requester_id, idempotency_key)
) STRICT, WITHOUT ROWID;
CREATE INDEX idempotency_keys_expiry ON idempotency_keys (expires_ms);
CREATE INDEX idempotency_keys_of_job ON idempotency_keys (job_id);

CREATE TABLE pruned_jobs (
  job_id TEXT NOT NULL,
  queue TEXT NOT NULL,
  requester_id TEXT NOT NULL,
  pruned_ms INTEGER NOT NULL,
  PRIMARY KEY (job_id, queue)
) STRICT, WITHOUT ROWID;
CREATE INDEX pruned_jobs_age ON pruned_jobs (pruned_ms);

CREATE TABLE job_workers (
  queue TEXT NOT NULL,
  worker_id TEXT NOT NULL,
  seen_ms INTEGER NOT NULL,
  slots INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (queue, worker_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE api_keys (
  key_id TEXT PRIMARY KEY,
  name TEXT NOT NULL,
  scopes TEXT NOT NULL,
  secret_h TEXT NOT NULL,
  created_ms INTEGER NOT NULL,
  expires_ms INTEGER NOT NULL DEFAULT 0,
  last_used_ms INTEGER NOT NULL DEFAULT 0,
  quota TEXT NOT NULL DEFAULT '{}'
) STRICT, WITHOUT ROWID;

CREATE TABLE api_tickets (
  ticket_h TEXT PRIMARY KEY,
  caller TEXT NOT NULL,
  expires_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE api_sessions (
  session_h TEXT PRIMARY KEY,
  key_id TEXT NOT NULL,
  created_ms INTEGER NOT NULL,
  expires_ms INTEGER NOT NULL,
  idle_ms INTEGER NOT NULL,
  seen_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE webhook_secrets (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  requester_id TEXT NOT NULL,
  secret TEXT NOT NULL,
  created_ms INTEGER NOT NULL,
  expires_ms INTEGER NOT NULL DEFAULT 0,
  name TEXT,
  encrypted BLOB,
  dek_wrapped BLOB,
  kek_id TEXT,
  encryption_version INTEGER
) STRICT;
CREATE INDEX webhook_secrets_of ON webhook_secrets (requester_id, id);
CREATE UNIQUE INDEX webhook_secrets_name ON webhook_secrets (name);

CREATE TABLE audit_log (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  entry TEXT NOT NULL,
  number INTEGER,
  prev TEXT NOT NULL DEFAULT '',
  hash TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE UNIQUE INDEX audit_log_number ON audit_log (number);

-- Our statements write the events of their steps themselves and raise `event_count` by one. For every other
-- writer this trigger does it.
CREATE TRIGGER inbox_jobs_event AFTER UPDATE OF status ON inbox_jobs
WHEN OLD.status <> NEW.status AND NEW.status_webhook_url IS NOT NULL
  AND NEW.event_count <> OLD.event_count + 1
BEGIN
  UPDATE inbox_jobs SET event_count = OLD.event_count + 1 WHERE seq = NEW.seq;
  INSERT INTO job_outbox_events (job_id, queue, task, gid, requester_id, max_attempts, ready,
      created_ms, updated_ms, status_webhook_url, trace, payload)
    SELECT NEW.job_id || '.' || (OLD.event_count + 1), NEW.queue || '/outbox', 'webhook', NEW.job_id,
      NEW.requester_id, 10, NOT EXISTS (SELECT 1 FROM job_outbox_events e
        WHERE e.gid = NEW.job_id AND e.status NOT IN ('succeeded', 'dead_letter')),
      NEW.updated_ms, NEW.updated_ms, NEW.status_webhook_url, NEW.trace,
    '{"event_id":' || json_quote(NEW.job_id || '.' || (OLD.event_count + 1)) || ',"job_id":'
      || json_quote(NEW.job_id) || ',"seq":' || (OLD.event_count + 1) || ',"status":"' || NEW.status
      || '","previous_status":"' || OLD.status || '","task":' || json_quote(NEW.task)
      || ',"attempt":' || NEW.attempt_count || ',"max_attempts":' || NEW.max_attempts
      || ',"occurred_ms":' || NEW.updated_ms
      || CASE WHEN NEW.status = 'succeeded'
          THEN ',"outputs":' || coalesce(nullif(NEW.result, ''), 'null')
        WHEN NEW.status IN ('failed', 'dead_letter')
          THEN ',"error":' || coalesce(nullif(NEW.error, ''), 'null')
        WHEN NEW.progress <> '' THEN ',"progress":' || NEW.progress ELSE '' END || '}';
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, to_state, max_attempts, gid)
    VALUES (NEW.queue || '/outbox', NEW.job_id || '.' || (OLD.event_count + 1), 1, 'submit',
      NEW.updated_ms, 'webhook', 'queued', 10, NEW.job_id);
END;

-- The step that ends a job removes its credentials, unless the queue keeps them.
CREATE TRIGGER inbox_jobs_forget AFTER UPDATE OF status ON inbox_jobs
WHEN NEW.storage_creds_kek_id IS NOT NULL AND NEW.status IN ('succeeded', 'dead_letter')
  AND NOT EXISTS (SELECT 1 FROM job_queues WHERE queue = NEW.queue AND keep_credentials)
BEGIN
  UPDATE inbox_jobs SET storage_creds_encrypted = NULL, storage_creds_dek_wrapped = NULL,
    storage_creds_kek_id = NULL, storage_creds_encryption_version = NULL
  WHERE seq = NEW.seq;
END;

-- The control plane's own tables.

CREATE TABLE plane_secrets (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  secret TEXT NOT NULL
) STRICT;

-- Streams whose messages travel through Redis; of all others a job's row is its own message.
CREATE TABLE plane_streams (
  queue TEXT PRIMARY KEY
) STRICT, WITHOUT ROWID;

-- The enqueue outbox: for each job of such a stream that is in the queue, the message it needs.
-- `enqueue_id` is the job's claim version when it came into the queue: a message is current while the
-- job waits under that version, or runs under the next one.
CREATE TABLE plane_messages (
  job_id TEXT PRIMARY KEY,
  queue TEXT NOT NULL,
  enqueue_id INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  sent_ms INTEGER NOT NULL DEFAULT 0,
  sent_redis_ms INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE INDEX plane_messages_unsent ON plane_messages (queue, seq) WHERE sent_ms = 0;
CREATE INDEX plane_messages_sent ON plane_messages (queue, sent_ms) WHERE sent_ms > 0;

CREATE TRIGGER plane_jobs_entered AFTER INSERT ON plane_jobs
WHEN NEW.ready AND EXISTS (SELECT 1 FROM plane_streams WHERE queue = NEW.queue)
BEGIN
  INSERT INTO plane_messages (job_id, queue, enqueue_id, seq)
    VALUES (NEW.job_id, NEW.queue, NEW.claim_version, NEW.seq)
    ON CONFLICT (job_id) DO UPDATE SET queue = excluded.queue, enqueue_id = excluded.enqueue_id,
      seq = excluded.seq, sent_ms = 0;
END;

CREATE TRIGGER plane_jobs_returned AFTER UPDATE OF ready ON plane_jobs
WHEN NEW.ready AND NOT OLD.ready AND EXISTS (SELECT 1 FROM plane_streams WHERE queue = NEW.queue)
BEGIN
  INSERT INTO plane_messages (job_id, queue, enqueue_id, seq)
    VALUES (NEW.job_id, NEW.queue, NEW.claim_version, NEW.seq)
    ON CONFLICT (job_id) DO UPDATE SET queue = excluded.queue, enqueue_id = excluded.enqueue_id,
      seq = excluded.seq, sent_ms = 0;
END;

-- No row may have a rowid of 2^62 or more: a row with the largest rowid would end the table's AUTOINCREMENT,
-- even after it is removed, and every later insert would fail with "database or disk is full".
-- @for table in inbox_jobs job_outbox_events plane_jobs job_journal audit_log
CREATE TRIGGER {table}_place_begin BEFORE INSERT ON {table} WHEN NEW.seq >= 4611686018427387904
BEGIN
  SELECT RAISE(ABORT, 'constraint: places_within_bounds');
END;
CREATE TRIGGER {table}_place_step BEFORE UPDATE OF seq ON {table} WHEN NEW.seq >= 4611686018427387904
BEGIN
  SELECT RAISE(ABORT, 'constraint: places_within_bounds');
END;
-- @end
CREATE TRIGGER webhook_secrets_place_begin BEFORE INSERT ON webhook_secrets WHEN NEW.id >= 4611686018427387904
BEGIN
  SELECT RAISE(ABORT, 'constraint: places_within_bounds');
END;
CREATE TRIGGER webhook_secrets_place_step BEFORE UPDATE OF id ON webhook_secrets WHEN NEW.id >= 4611686018427387904
BEGIN
  SELECT RAISE(ABORT, 'constraint: places_within_bounds');
END;
