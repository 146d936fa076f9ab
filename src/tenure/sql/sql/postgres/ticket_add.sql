-- Keeps a ticket, as a hash, for one use within its time.
-- Takes: ticket_h text, caller text, ttl_ms bigint
-- Returns: nothing
-- Clauses: I-44
INSERT INTO api_tickets (ticket_h, caller, expires_ms) VALUES (:ticket_h, :caller, {now} + :ttl_ms)
