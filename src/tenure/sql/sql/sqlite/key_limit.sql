-- Gives an API key other numbers for what it may ask for.
-- Takes: key_id text, quota text
-- Returns: a row if there is such a key
-- Clauses: I-44
UPDATE api_keys SET quota = :quota WHERE key_id = :key_id RETURNING key_id;
