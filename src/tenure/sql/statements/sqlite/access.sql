-- Keys, sessions, tickets and the audit log of the gateway.

-- name: key_add
-- Stores an API key, with a hash instead of its secret.
-- Takes: key_id text, name text, scopes text, secret_h text, ttl_ms bigint
-- Returns: when it was made
-- Clauses: I-44
INSERT INTO api_keys (key_id, name, scopes, secret_h, created_ms, expires_ms)
VALUES (:key_id, :name, :scopes, :secret_h, :now_ms, CASE WHEN :ttl_ms > 0 THEN :now_ms + :ttl_ms ELSE 0 END);
SELECT created_ms, expires_ms FROM api_keys WHERE key_id = :key_id;

-- name: key_find
-- One API key, expired or not.
-- Takes: key_id text
-- Returns: its row, or nothing
-- Clauses: I-44
SELECT key_id, name, scopes, secret_h, created_ms, expires_ms, last_used_ms, quota FROM api_keys WHERE key_id = :key_id;

-- name: key_limit
-- Sets the quota of an API key.
-- Takes: key_id text, quota text
-- Returns: a row if there is such a key
-- Clauses: I-44
UPDATE api_keys SET quota = :quota WHERE key_id = :key_id RETURNING key_id;

-- name: key_list
-- All API keys, oldest first.
-- Returns: their rows
-- Clauses: I-44
SELECT key_id, name, scopes, secret_h, created_ms, expires_ms, last_used_ms, quota FROM api_keys ORDER BY created_ms, key_id;

-- name: key_revoke
-- Deletes an API key and ends its sessions.
-- Takes: key_id text
-- Returns: how many keys there were
-- Clauses: I-44
DELETE FROM api_sessions WHERE key_id = :key_id;
DELETE FROM api_keys WHERE key_id = :key_id;
SELECT changes() AS gone;

-- name: key_touch
-- Stores when an API key was last used.
-- Takes: key_id text
-- Returns: nothing
-- Clauses: I-44
UPDATE api_keys SET last_used_ms = :now_ms WHERE key_id = :key_id;

-- name: session_add
-- Stores a session, as a hash; removes expired ones, and the oldest of its key beyond `others`.
-- Takes: session_h text, key_id text, ttl_ms bigint, idle_ms bigint, others bigint
-- Returns: nothing
-- Clauses: I-44
DELETE FROM api_sessions
WHERE expires_ms <= :now_ms OR seen_ms + idle_ms <= :now_ms OR session_h IN (
  SELECT o.session_h FROM api_sessions o WHERE o.key_id = :key_id
  ORDER BY o.created_ms DESC, o.session_h LIMIT -1 OFFSET :others);
INSERT INTO api_sessions (session_h, key_id, created_ms, expires_ms, idle_ms, seen_ms)
VALUES (:session_h, :key_id, :now_ms, :now_ms + :ttl_ms, :idle_ms, :now_ms);

-- name: session_end
-- Ends sessions: one by its hash, or all of a key.
-- Takes: session_h text, key_id text
-- Returns: how many there were
-- Clauses: I-44
DELETE FROM api_sessions WHERE session_h = :session_h OR key_id = :key_id;
SELECT changes() AS gone;

-- name: session_find
-- Live sessions: one by its hash, or all for an empty hash.
-- Takes: session_h text
-- Returns: their rows, oldest first, and how long ago each was used
-- Clauses: I-44
SELECT session_h, key_id, created_ms, expires_ms, idle_ms, seen_ms, :now_ms - seen_ms AS unused_ms
FROM api_sessions
WHERE (:session_h = '' OR session_h = :session_h) AND expires_ms > :now_ms AND seen_ms + idle_ms > :now_ms
ORDER BY created_ms;

-- name: session_touch
-- Stores when a session was last used.
-- Takes: session_h text
-- Returns: nothing
-- Clauses: I-44
UPDATE api_sessions SET seen_ms = :now_ms WHERE session_h = :session_h;

-- name: ticket_add
-- Stores a ticket, as a hash, for one use before it expires.
-- Takes: ticket_h text, caller text, ttl_ms bigint
-- Returns: nothing
-- Clauses: I-44
INSERT INTO api_tickets (ticket_h, caller, expires_ms) VALUES (:ticket_h, :caller, :now_ms + :ttl_ms);

-- name: ticket_take
-- Uses a ticket up.
-- Takes: ticket_h text
-- Returns: its caller, if it had not expired
-- Clauses: I-44
DELETE FROM temp.spent;
INSERT INTO temp.spent SELECT caller FROM api_tickets WHERE ticket_h = :ticket_h AND expires_ms > :now_ms;
DELETE FROM api_tickets WHERE ticket_h = :ticket_h;
SELECT caller FROM temp.spent;

-- name: audit_add
-- Appends an entry to the audit log under the next number of the chain, and removes the oldest entries. If
-- another gateway has taken the number, nothing is written.
-- Takes: number bigint, prev text, hash text, entry text, pruned bigint
-- Returns: the position of the entry; no row if the number was taken
-- Clauses: I-44
INSERT INTO audit_log (number, prev, hash, entry) SELECT :number, :prev, :hash, :entry
WHERE true ON CONFLICT (number) DO NOTHING;
DELETE FROM audit_log WHERE seq <= :pruned
AND EXISTS (SELECT 1 FROM audit_log WHERE number = :number AND hash = :hash);
SELECT seq FROM audit_log WHERE number = :number AND hash = :hash;

-- name: audit_head
-- The end of the audit chain, and how many entries there are. The chain ends at the largest number whose
-- successor is free, so that an entry at the end of the number range does not stop the log.
-- Returns: one row
-- Clauses: I-44
WITH head AS (
  SELECT number, hash FROM audit_log entry WHERE number BETWEEN 1 AND 4611686018427387903
  AND NOT EXISTS (SELECT 1 FROM audit_log taken WHERE taken.number = entry.number + 1)
  ORDER BY number DESC LIMIT 1
)
SELECT
  coalesce((SELECT number FROM head), 0) AS number,
  coalesce((SELECT hash FROM head), '') AS hash,
  coalesce((SELECT max(seq) FROM audit_log), 0) AS seq,
  (SELECT count(*) FROM audit_log) AS size;

-- name: audit_list
-- Audit entries, newest first.
-- Takes: through bigint, count integer
-- Returns: a row each
-- Clauses: I-44
SELECT seq, number, prev, hash, entry FROM audit_log WHERE seq <= :through ORDER BY seq DESC LIMIT :count;

-- name: audit_read
-- Audit entries, oldest first.
-- Takes: after bigint, count integer
-- Returns: a row each
-- Clauses: I-44
SELECT seq, number, prev, hash, entry FROM audit_log WHERE seq > :after ORDER BY seq LIMIT :count;
