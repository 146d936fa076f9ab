-- Spends a ticket.
-- Takes: ticket_h text
-- Returns: whose it was, while it was good
-- Clauses: I-44
WITH spent AS (DELETE FROM api_tickets WHERE ticket_h = :ticket_h RETURNING caller, expires_ms)
SELECT caller FROM spent WHERE expires_ms > {now}
