-- Adds a requester's newest webhook secret; older ones stay live for a while, so that receivers can move.
-- Takes: requester_id text, name text, encrypted bytea, dek_wrapped bytea, kek_id text
-- Takes: encryption_version integer, overlap_ms bigint
-- Returns: nothing
-- Clauses: I-43
UPDATE webhook_secrets SET expires_ms = :now_ms + :overlap_ms
WHERE requester_id = :requester_id AND (expires_ms = 0 OR expires_ms > :now_ms + :overlap_ms);
INSERT INTO webhook_secrets (requester_id, name, secret, encrypted, dek_wrapped, kek_id,
  encryption_version, created_ms)
VALUES (:requester_id, :name, '', :encrypted, :dek_wrapped, :kek_id, :encryption_version, :now_ms);
