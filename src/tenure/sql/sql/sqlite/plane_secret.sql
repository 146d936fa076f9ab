-- The secret from which the control plane's lease tokens are made; the first plane chooses it.
-- Takes: fresh text
-- Returns: the secret
-- Clauses: P-6
INSERT OR IGNORE INTO plane_secrets (id, secret) VALUES (1, :fresh);
SELECT secret FROM plane_secrets WHERE id = 1;
