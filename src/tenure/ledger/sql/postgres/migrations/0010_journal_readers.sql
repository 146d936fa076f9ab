-- Who keeps the history elsewhere, and how far: what they have not read is trimmed later than the rest.

CREATE TABLE journal_readers (
  queue text NOT NULL,
  name text NOT NULL,
  position bigint NOT NULL,
  seen_ms bigint NOT NULL,
  PRIMARY KEY (queue, name)
);
