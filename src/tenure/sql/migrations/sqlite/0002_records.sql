-- Small records beside a queue. The same table as on PostgreSQL, whose file explains it.

CREATE TABLE queue_records (
  queue TEXT NOT NULL,
  grp TEXT NOT NULL,
  name TEXT NOT NULL,
  value TEXT NOT NULL,
  expires_ms INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (queue, grp, name)
) STRICT, WITHOUT ROWID;
CREATE INDEX queue_records_expiry ON queue_records (expires_ms) WHERE expires_ms > 0;
