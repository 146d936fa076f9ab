-- What the control plane keeps beside its jobs.

CREATE TABLE plane_secrets (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  secret TEXT NOT NULL
) STRICT;

-- Streams whose messages travel through Redis; of all others a job's row is its own message.
CREATE TABLE plane_streams (
  queue TEXT PRIMARY KEY
) STRICT, WITHOUT ROWID;

-- The enqueue outbox: for each job of such a stream that is in the line, the message it needs.
-- `enqueue_id` is the job's claim version when it came into the line: a message is current while the
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
