-- The tables of the SQL queues, and the rules that no writer can go round.
--
-- The same tables, columns and rules as in the other dialect, whose file says what they are for.
-- `seq` is the rowid, so that a turn costs nothing.

CREATE TABLE job_queues (
  queue TEXT PRIMARY KEY,
  paused INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

-- @for box in inbox_jobs job_outbox_events plane_jobs
CREATE TABLE {box} (
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

CREATE INDEX {box}_in_line ON {box} (queue, priority, seq) WHERE ready;
CREATE INDEX {box}_not_due ON {box} (queue, due_ms) WHERE due_ms > 0;
CREATE INDEX {box}_leased ON {box} (queue, lease_expires_at) WHERE lease_expires_at > 0;
CREATE INDEX {box}_mortal ON {box} (queue, expires_ms) WHERE expires_ms > 0;
CREATE INDEX {box}_sealed ON {box} (job_id) WHERE storage_creds_kek_id IS NOT NULL;
CREATE INDEX {box}_resting ON {box} (queue) WHERE status = 'failed';

CREATE TRIGGER {box}_begin BEFORE INSERT ON {box}
WHEN NEW.status <> 'queued'
BEGIN
  SELECT RAISE(ABORT, 'transition: a new job is queued');
END;

CREATE TRIGGER {box}_step BEFORE UPDATE ON {box}
WHEN (OLD.status <> NEW.status
    AND OLD.status || '>' || NEW.status NOT IN (
      'queued>claimed', 'claimed>fetching', 'fetching>processing', 'processing>uploading',
      'uploading>succeeded', 'claimed>queued', 'fetching>queued', 'processing>queued',
      'uploading>queued', 'claimed>failed', 'fetching>failed', 'processing>failed',
      'uploading>failed', 'failed>queued', 'failed>dead_letter')
    AND OLD.status || '>' || NEW.passed || NEW.status NOT IN (
      'claimed>fetching>processing', 'claimed>fetching>processing>uploading',
      'fetching>processing>uploading', 'claimed>fetching>processing>uploading>succeeded',
      'fetching>processing>uploading>succeeded', 'processing>uploading>succeeded',
      'claimed>failed>dead_letter', 'fetching>failed>dead_letter',
      'processing>failed>dead_letter', 'uploading>failed>dead_letter',
      'queued>claimed>failed>dead_letter'))
  OR (NEW.status = 'claimed' AND NEW.passed <> '')
  OR NEW.claim_version <> OLD.claim_version
    + (CASE WHEN OLD.status = 'queued' AND NEW.status = 'claimed' THEN 1 ELSE 0 END)
  OR (OLD.status = 'failed' AND NEW.status = 'queued' AND OLD.attempt_count >= OLD.max_attempts)
BEGIN
  SELECT RAISE(ABORT, 'transition: the table has no such step');
END;
-- @end

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
  news TEXT
) STRICT;
CREATE INDEX job_journal_of_queue ON job_journal (queue, seq);
CREATE INDEX job_journal_of_job ON job_journal (job_id, ver);
-- Lists jobs by age. An index of the box itself would be written with every step of every job.
CREATE INDEX job_journal_submits ON job_journal (queue, seq) WHERE type = 'submit';

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
  PRIMARY KEY (job_id, claim_version)
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
  job_id TEXT PRIMARY KEY,
  queue TEXT NOT NULL,
  requester_id TEXT NOT NULL,
  pruned_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX pruned_jobs_age ON pruned_jobs (pruned_ms);

CREATE TABLE job_workers (
  queue TEXT NOT NULL,
  worker_id TEXT NOT NULL,
  seen_ms INTEGER NOT NULL,
  PRIMARY KEY (queue, worker_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE api_keys (
  key_id TEXT PRIMARY KEY,
  name TEXT NOT NULL,
  scopes TEXT NOT NULL,
  secret_h TEXT NOT NULL,
  created_ms INTEGER NOT NULL,
  expires_ms INTEGER NOT NULL DEFAULT 0,
  last_used_ms INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

CREATE TABLE webhook_secrets (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  requester_id TEXT NOT NULL,
  secret TEXT NOT NULL,
  created_ms INTEGER NOT NULL,
  expires_ms INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX webhook_secrets_of ON webhook_secrets (requester_id, id);

CREATE TABLE api_tickets (
  ticket_h TEXT PRIMARY KEY,
  caller TEXT NOT NULL,
  expires_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX job_outbox_events_held_back ON job_outbox_events (queue, seq)
  WHERE status = 'queued' AND NOT ready AND due_ms = 0;
CREATE INDEX job_outbox_events_of_job ON job_outbox_events (gid, seq)
  WHERE status NOT IN ('succeeded', 'dead_letter');

CREATE TRIGGER inbox_jobs_tell AFTER UPDATE OF status ON inbox_jobs
WHEN OLD.status <> NEW.status AND NEW.status_webhook_url IS NOT NULL
BEGIN
  UPDATE inbox_jobs SET event_count = event_count + 1 WHERE seq = NEW.seq;
  INSERT INTO job_outbox_events (job_id, queue, task, gid, requester_id, max_attempts, ready,
      created_ms, updated_ms, status_webhook_url, trace, payload)
    SELECT j.job_id || '.' || j.event_count, j.queue || '/outbox', 'webhook', j.job_id,
      j.requester_id, 10, NOT EXISTS (SELECT 1 FROM job_outbox_events e
        WHERE e.gid = j.job_id AND e.status NOT IN ('succeeded', 'dead_letter')),
      j.updated_ms, j.updated_ms, j.status_webhook_url, j.trace,
      CASE WHEN j.status = 'succeeded' THEN json_set(b.body, '$.outputs',
          json(CASE WHEN j.result = '' THEN 'null' ELSE j.result END))
        WHEN j.status IN ('failed', 'dead_letter') THEN json_set(b.body, '$.error',
          json(CASE WHEN j.error = '' THEN 'null' ELSE j.error END))
        WHEN j.progress <> '' THEN json_set(b.body, '$.progress', json(j.progress))
        ELSE b.body END
    FROM inbox_jobs j, (SELECT json_object('event_id', i.job_id || '.' || i.event_count,
        'job_id', i.job_id, 'seq', i.event_count, 'status', i.status,
        'previous_status', OLD.status, 'task', i.task, 'attempt', i.attempt_count,
        'max_attempts', i.max_attempts, 'occurred_ms', i.updated_ms) AS body
      FROM inbox_jobs i WHERE i.seq = NEW.seq) b
    WHERE j.seq = NEW.seq;
  INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, to_state, max_attempts, gid)
    SELECT j.queue || '/outbox', j.job_id || '.' || j.event_count, 1, 'submit', j.updated_ms,
      'webhook', 'queued', 10, j.job_id
    FROM inbox_jobs j WHERE j.seq = NEW.seq;
END;
