-- Webhook secrets are sealed like credentials, bound to their name and their requester. Those that lie
-- here as they are (`secret` not empty) are sealed when they are next used, and by a rotation of keys.

ALTER TABLE webhook_secrets ADD COLUMN name text COLLATE "C";
ALTER TABLE webhook_secrets ADD COLUMN encrypted bytea;
ALTER TABLE webhook_secrets ADD COLUMN dek_wrapped bytea;
ALTER TABLE webhook_secrets ADD COLUMN kek_id text;
ALTER TABLE webhook_secrets ADD COLUMN encryption_version integer;
UPDATE webhook_secrets SET name = 'webhook-secret/' || id;
ALTER TABLE webhook_secrets ALTER COLUMN name SET NOT NULL;
ALTER TABLE webhook_secrets ADD CONSTRAINT sealed_or_not CHECK ((secret = '') = (encrypted IS NOT NULL));
CREATE UNIQUE INDEX webhook_secrets_name ON webhook_secrets (name);
