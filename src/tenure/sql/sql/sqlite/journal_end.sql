-- The last position that was given out, whether or not its writer has committed.
-- Returns: one row
-- Clauses: I-32
SELECT coalesce(max(seq), 0) AS seq FROM job_journal;
