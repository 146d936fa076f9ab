-- Places within bounds: a row that is written with the largest rowid would end its table's AUTOINCREMENT,
-- even after it is removed, and every insert would be "database or disk is full". No writer may store a row
-- beyond 2^62. Rows that are there already follow the others, in their order, and the table counts on.

-- @for box in inbox_jobs job_outbox_events plane_jobs job_journal audit_log
UPDATE {box} SET seq = moved.place FROM (
  SELECT seq AS wild, row_number() OVER (ORDER BY seq)
    + (SELECT coalesce(max(seq), 0) FROM {box} WHERE seq < 4611686018427387904) AS place
  FROM {box} WHERE seq >= 4611686018427387904) moved
WHERE seq = moved.wild;
UPDATE sqlite_sequence SET seq = (SELECT coalesce(max(seq), 0) FROM {box})
WHERE name = '{box}' AND seq >= 4611686018427387904;
CREATE TRIGGER {box}_place_begin BEFORE INSERT ON {box} WHEN NEW.seq >= 4611686018427387904
BEGIN
  SELECT RAISE(ABORT, 'constraint: places_within_bounds');
END;
CREATE TRIGGER {box}_place_step BEFORE UPDATE OF seq ON {box} WHEN NEW.seq >= 4611686018427387904
BEGIN
  SELECT RAISE(ABORT, 'constraint: places_within_bounds');
END;
-- @end

UPDATE journal_readers SET position = (SELECT coalesce(max(seq), 0) FROM job_journal)
WHERE position >= 4611686018427387904;

UPDATE webhook_secrets SET id = moved.place FROM (
  SELECT id AS wild, row_number() OVER (ORDER BY id)
    + (SELECT coalesce(max(id), 0) FROM webhook_secrets WHERE id < 4611686018427387904) AS place
  FROM webhook_secrets WHERE id >= 4611686018427387904) moved
WHERE id = moved.wild;
UPDATE sqlite_sequence SET seq = (SELECT coalesce(max(id), 0) FROM webhook_secrets)
WHERE name = 'webhook_secrets' AND seq >= 4611686018427387904;
CREATE TRIGGER webhook_secrets_place_begin BEFORE INSERT ON webhook_secrets WHEN NEW.id >= 4611686018427387904
BEGIN
  SELECT RAISE(ABORT, 'constraint: places_within_bounds');
END;
CREATE TRIGGER webhook_secrets_place_step BEFORE UPDATE OF id ON webhook_secrets WHEN NEW.id >= 4611686018427387904
BEGIN
  SELECT RAISE(ABORT, 'constraint: places_within_bounds');
END;
