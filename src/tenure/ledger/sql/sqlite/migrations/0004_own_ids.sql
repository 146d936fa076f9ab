-- Two contracts in one file each have ids of their own: what is kept of a job is kept with its queue.

ALTER TABLE job_attempts RENAME TO job_attempts_before;
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
INSERT INTO job_attempts SELECT job_id, claim_version, queue, attempt, worker_id, claimed_ms,
  ended_ms, verdict, outcome_h, error_code, error, due_ms FROM job_attempts_before;
DROP TABLE job_attempts_before;

ALTER TABLE pruned_jobs RENAME TO pruned_jobs_before;
CREATE TABLE pruned_jobs (
  job_id TEXT NOT NULL,
  queue TEXT NOT NULL,
  requester_id TEXT NOT NULL,
  pruned_ms INTEGER NOT NULL,
  PRIMARY KEY (job_id, queue)
) STRICT, WITHOUT ROWID;
INSERT INTO pruned_jobs SELECT job_id, queue, requester_id, pruned_ms FROM pruned_jobs_before;
DROP TABLE pruned_jobs_before;
CREATE INDEX pruned_jobs_age ON pruned_jobs (pruned_ms);
