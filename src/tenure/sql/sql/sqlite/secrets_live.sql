-- The live webhook secrets of a requester, newest first.
-- Takes: requester_id text
-- Returns: their rows; `secret` is empty where it is sealed
-- Clauses: I-43
SELECT name, requester_id, secret, encrypted, dek_wrapped, kek_id, encryption_version
FROM webhook_secrets
WHERE requester_id = :requester_id AND (expires_ms = 0 OR expires_ms > :now_ms)
ORDER BY id DESC LIMIT 2;
