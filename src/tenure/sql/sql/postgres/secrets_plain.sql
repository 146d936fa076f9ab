-- Webhook secrets from before they were sealed.
-- Takes: count integer
-- Returns: their rows
-- Clauses: I-43
SELECT name, requester_id, secret FROM webhook_secrets WHERE secret <> '' ORDER BY id LIMIT :count
