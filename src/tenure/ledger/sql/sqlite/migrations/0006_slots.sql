-- How many jobs a worker runs at once; 0 where it does not say.

ALTER TABLE job_workers ADD COLUMN slots INTEGER NOT NULL DEFAULT 0;
