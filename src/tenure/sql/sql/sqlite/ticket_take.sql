-- Spends a ticket.
-- Takes: ticket_h text
-- Returns: whose it was, while it was good
-- Clauses: I-44
DELETE FROM temp.spent;
INSERT INTO temp.spent SELECT caller FROM api_tickets WHERE ticket_h = :ticket_h AND expires_ms > :now_ms;
DELETE FROM api_tickets WHERE ticket_h = :ticket_h;
SELECT caller FROM temp.spent;
