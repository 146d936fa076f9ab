-- Two contracts in one schema each have ids of their own: what is kept of a job is kept with its queue.

ALTER TABLE job_attempts DROP CONSTRAINT job_attempts_pkey;
ALTER TABLE job_attempts ADD PRIMARY KEY (job_id, claim_version, queue);

ALTER TABLE pruned_jobs ALTER COLUMN queue TYPE text COLLATE "C";
ALTER TABLE pruned_jobs DROP CONSTRAINT pruned_jobs_pkey;
ALTER TABLE pruned_jobs ADD PRIMARY KEY (job_id, queue);
