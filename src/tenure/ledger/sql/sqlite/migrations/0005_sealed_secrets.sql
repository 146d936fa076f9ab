-- Webhook secrets are sealed like credentials, bound to their name and their requester. Those that lie
-- here as they are (`secret` not empty) are sealed when they are next used, and by a rotation of keys.

ALTER TABLE webhook_secrets ADD COLUMN name TEXT;
ALTER TABLE webhook_secrets ADD COLUMN encrypted BLOB;
ALTER TABLE webhook_secrets ADD COLUMN dek_wrapped BLOB;
ALTER TABLE webhook_secrets ADD COLUMN kek_id TEXT;
ALTER TABLE webhook_secrets ADD COLUMN encryption_version INTEGER;
UPDATE webhook_secrets SET name = 'webhook-secret/' || id;
CREATE UNIQUE INDEX webhook_secrets_name ON webhook_secrets (name);
