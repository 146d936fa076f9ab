-- Small records beside a queue: its schedules, and the results that chained jobs wait for. A record with `expires_ms` is
-- removed after that time.

CREATE TABLE queue_records (
  queue text COLLATE "C" NOT NULL,
  grp text COLLATE "C" NOT NULL,
  name text COLLATE "C" NOT NULL,
  value text NOT NULL,
  expires_ms bigint NOT NULL DEFAULT 0,
  PRIMARY KEY (queue, grp, name)
);
CREATE INDEX queue_records_expiry ON queue_records (expires_ms) WHERE expires_ms > 0;
