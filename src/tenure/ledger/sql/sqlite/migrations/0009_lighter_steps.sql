-- What a step of a job costs beside the rows it writes: credentials are kept with jobs of the inbox
-- alone, so nobody looks for them elsewhere.

DROP INDEX job_outbox_events_sealed;
DROP INDEX plane_jobs_sealed;
