-- How much a key may ask for, where it has numbers of its own: a JSON object of gateway.limits.Quota.

ALTER TABLE api_keys ADD COLUMN quota text NOT NULL DEFAULT '{}';
