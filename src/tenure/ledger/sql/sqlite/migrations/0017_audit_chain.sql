-- The audit log as a chain: each entry has a number, the hash of the one before it, and its own. Entries
-- without a number were written before there was a chain.

ALTER TABLE audit_log ADD COLUMN number INTEGER;
ALTER TABLE audit_log ADD COLUMN prev TEXT NOT NULL DEFAULT '';
ALTER TABLE audit_log ADD COLUMN hash TEXT NOT NULL DEFAULT '';
CREATE UNIQUE INDEX audit_log_number ON audit_log (number);
