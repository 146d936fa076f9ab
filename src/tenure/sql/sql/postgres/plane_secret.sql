-- The secret from which the control plane's lease tokens are made; the first plane chooses it.
-- Takes: fresh text
-- Returns: the secret; nothing when another plane is choosing it right now
-- Clauses: P-6
WITH made AS (
  INSERT INTO plane_secrets (id, secret) VALUES (1, :fresh) ON CONFLICT DO NOTHING RETURNING secret
)
SELECT secret FROM made UNION ALL SELECT secret FROM plane_secrets WHERE id = 1 LIMIT 1
