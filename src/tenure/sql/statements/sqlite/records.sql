-- Small records beside a queue, in groups: schedules, and the results that chained jobs wait for.

-- name: records_read
-- The records of a group.
-- Takes: queue text, grp text
-- Returns: a row with the time for each record; one without a name if there is none
-- Clauses: I-75
SELECT :now_ms AS now_ms, r.name, r.value
FROM (SELECT 1) one LEFT JOIN queue_records r ON r.queue = :queue AND r.grp = :grp;

-- name: records_get
-- One record.
-- Takes: queue text, grp text, name text
-- Returns: its row, or nothing
-- Clauses: I-75
SELECT value FROM queue_records WHERE queue = :queue AND grp = :grp AND name = :name;

-- name: records_swap
-- Replaces a record if it is as the caller found it ('' before: absent; '' after: removed). Removes expired records.
-- Takes: queue text, grp text, name text, before text, after text, keep_ms bigint
-- Returns: whether the record is as wanted now
-- Clauses: I-75
DELETE FROM queue_records WHERE expires_ms > 0 AND expires_ms <= :now_ms AND NOT (queue = :queue AND grp = :grp);
DELETE FROM queue_records
WHERE queue = :queue AND grp = :grp AND name = :name AND value = :before AND :after = '';
UPDATE queue_records SET value = :after, expires_ms = CASE WHEN :keep_ms > 0 THEN :now_ms + :keep_ms ELSE 0 END
WHERE queue = :queue AND grp = :grp AND name = :name AND value = :before AND :after <> '';
INSERT INTO queue_records (queue, grp, name, value, expires_ms)
SELECT :queue, :grp, :name, :after, CASE WHEN :keep_ms > 0 THEN :now_ms + :keep_ms ELSE 0 END
WHERE :before = '' AND :after <> '' ON CONFLICT DO NOTHING;
SELECT coalesce((SELECT value FROM queue_records WHERE queue = :queue AND grp = :grp AND name = :name), '') = :after
  AS swapped;

-- name: records_size
-- How many records a group has.
-- Takes: queue text, grp text
-- Returns: the number
-- Clauses: I-75
SELECT count(*) AS size FROM queue_records WHERE queue = :queue AND grp = :grp;

-- name: records_chars
-- How many characters the records of a group have together.
-- Takes: queue text, grp text
-- Returns: the number
-- Clauses: I-75
SELECT coalesce(sum(length(value)), 0) AS chars FROM queue_records WHERE queue = :queue AND grp = :grp;

-- name: records_expire
-- Keeps a group for so long only.
-- Takes: queue text, grp text, keep_ms bigint
-- Returns: nothing
-- Clauses: I-75
UPDATE queue_records SET expires_ms = :now_ms + :keep_ms WHERE queue = :queue AND grp = :grp;
