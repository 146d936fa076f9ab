-- Adds a requester's newest webhook secret; older ones stay live for a while, so that receivers can move.
-- Takes: requester_id text, name text, encrypted bytea, dek_wrapped bytea, kek_id text
-- Takes: encryption_version integer, overlap_ms bigint
-- Returns: nothing
-- Clauses: I-43
WITH clock AS MATERIALIZED (SELECT {now} AS now_ms),
older AS (
  UPDATE webhook_secrets s SET expires_ms = c.now_ms + :overlap_ms FROM clock c
  WHERE s.requester_id = :requester_id AND (s.expires_ms = 0 OR s.expires_ms > c.now_ms + :overlap_ms)
)
INSERT INTO webhook_secrets (requester_id, name, secret, encrypted, dek_wrapped, kek_id,
  encryption_version, created_ms)
SELECT :requester_id, :name, '', :encrypted, :dek_wrapped, :kek_id, :encryption_version, now_ms
FROM clock
