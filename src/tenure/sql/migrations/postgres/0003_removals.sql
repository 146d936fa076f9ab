-- Finds the removal of the job that had an id before, without reading all events of that id.

CREATE INDEX job_journal_removals ON job_journal (job_id, seq) WHERE type = 'remove';
