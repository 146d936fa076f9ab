-- The last position that was given out, whether or not its writer has committed.
-- Returns: one row
-- Clauses: I-32
SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS seq FROM job_journal_seq_seq
