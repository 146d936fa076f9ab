-- The verdicts of leases that ended with these very outcomes: answers to settles that are sent again.
-- Batch: job_id text, fence bigint, outcome_h text
-- Takes: queue text
-- Returns: for each outcome that was accepted before its number, the verdict and when it was due
-- Clauses: I-17
SELECT a.n, t.verdict, t.due_ms
FROM {batch} a JOIN job_attempts t ON t.job_id = a.job_id AND t.claim_version = a.fence
WHERE t.queue = :queue AND t.outcome_h = a.outcome_h;
