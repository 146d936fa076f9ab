-- What the control plane keeps beside its jobs.

CREATE TABLE plane_secrets (
  id integer PRIMARY KEY CHECK (id = 1),
  secret text NOT NULL
);

-- Streams whose messages travel through Redis; of all others a job's row is its own message.
CREATE TABLE plane_streams (
  queue text COLLATE "C" PRIMARY KEY
);

-- The enqueue outbox: for each job of such a stream that is in the line, the message it needs.
-- `enqueue_id` is the job's claim version when it came into the line: a message is current while the
-- job waits under that version, or runs under the next one.
CREATE TABLE plane_messages (
  job_id text COLLATE "C" PRIMARY KEY,
  queue text COLLATE "C" NOT NULL,
  enqueue_id bigint NOT NULL,
  seq bigint NOT NULL,
  sent_ms bigint NOT NULL DEFAULT 0,
  sent_redis_ms bigint NOT NULL DEFAULT 0
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX plane_messages_unsent ON plane_messages (queue, seq) WHERE sent_ms = 0;
CREATE INDEX plane_messages_sent ON plane_messages (queue, sent_ms) WHERE sent_ms > 0;

CREATE FUNCTION plane_jobs_entered() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO plane_messages (job_id, queue, enqueue_id, seq)
    SELECT f.job_id, f.queue, f.claim_version, f.seq
    FROM fresh f JOIN plane_streams s ON s.queue = f.queue WHERE f.ready
    ON CONFLICT (job_id) DO UPDATE SET queue = excluded.queue, enqueue_id = excluded.enqueue_id,
      seq = excluded.seq, sent_ms = 0;
  RETURN NULL;
END $$;
CREATE TRIGGER plane_jobs_entered AFTER INSERT ON plane_jobs
  REFERENCING NEW TABLE AS fresh FOR EACH STATEMENT EXECUTE FUNCTION plane_jobs_entered();

CREATE FUNCTION plane_jobs_returned() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO plane_messages (job_id, queue, enqueue_id, seq)
    SELECT NEW.job_id, NEW.queue, NEW.claim_version, NEW.seq
    FROM plane_streams s WHERE s.queue = NEW.queue
    ON CONFLICT (job_id) DO UPDATE SET queue = excluded.queue, enqueue_id = excluded.enqueue_id,
      seq = excluded.seq, sent_ms = 0;
  RETURN NULL;
END $$;
CREATE TRIGGER plane_jobs_returned AFTER UPDATE ON plane_jobs FOR EACH ROW
  WHEN (NEW.ready AND NOT OLD.ready) EXECUTE FUNCTION plane_jobs_returned();
