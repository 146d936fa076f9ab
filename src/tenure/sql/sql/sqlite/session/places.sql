-- Lets tables count on after another program moved their AUTOINCREMENT, or rows, to 2^62 or beyond: at the
-- largest number every insert is "database or disk is full". Such rows follow the others, in their order.

UPDATE journal_readers SET position = (SELECT coalesce(max(seq), 0) FROM job_journal WHERE seq < 4611686018427387904)
  + (SELECT count(*) FROM job_journal WHERE seq BETWEEN 4611686018427387904 AND position)
WHERE position >= 4611686018427387904;

-- @for box in inbox_jobs job_outbox_events plane_jobs job_journal audit_log
UPDATE {box} SET seq = moved.place FROM (
  SELECT seq AS wild, row_number() OVER (ORDER BY seq)
    + (SELECT coalesce(max(seq), 0) FROM {box} WHERE seq < 4611686018427387904) AS place
  FROM {box} WHERE seq >= 4611686018427387904) moved
WHERE seq = moved.wild;
UPDATE sqlite_sequence SET seq = (SELECT coalesce(max(seq), 0) FROM {box})
WHERE name = '{box}' AND seq >= 4611686018427387904;
-- @end

UPDATE webhook_secrets SET id = moved.place FROM (
  SELECT id AS wild, row_number() OVER (ORDER BY id)
    + (SELECT coalesce(max(id), 0) FROM webhook_secrets WHERE id < 4611686018427387904) AS place
  FROM webhook_secrets WHERE id >= 4611686018427387904) moved
WHERE id = moved.wild;
UPDATE sqlite_sequence SET seq = (SELECT coalesce(max(id), 0) FROM webhook_secrets)
WHERE name = 'webhook_secrets' AND seq >= 4611686018427387904;
