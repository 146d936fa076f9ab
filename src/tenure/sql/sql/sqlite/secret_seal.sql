-- Puts what is sealed in the place of what lies open.
-- Takes: name text, encrypted bytea, dek_wrapped bytea, kek_id text, encryption_version integer
-- Returns: nothing
-- Clauses: I-43
UPDATE webhook_secrets SET secret = '', encrypted = :encrypted, dek_wrapped = :dek_wrapped,
  kek_id = :kek_id, encryption_version = :encryption_version
WHERE name = :name AND secret <> '';
