-- How many jobs are in which state.
-- Takes: queue text
-- Returns: a row for each state there is
-- Clauses: I-25
SELECT status, count(*) AS jobs FROM {jobs} WHERE queue = :queue GROUP BY status;
