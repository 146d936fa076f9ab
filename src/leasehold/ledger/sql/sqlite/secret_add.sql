-- Adds a requester's newest webhook secret; older ones stay live for a while, so that receivers can move.
-- Takes: requester_id text, secret text, overlap_ms bigint
-- Returns: nothing
-- Clauses: I-43
UPDATE webhook_secrets SET expires_ms = :now_ms + :overlap_ms
WHERE requester_id = :requester_id AND (expires_ms = 0 OR expires_ms > :now_ms + :overlap_ms);
INSERT INTO webhook_secrets (requester_id, secret, created_ms)
VALUES (:requester_id, :secret, :now_ms);
