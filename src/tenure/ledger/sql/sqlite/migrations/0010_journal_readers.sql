-- Who keeps the history elsewhere, and how far: what they have not read is trimmed later than the rest.

CREATE TABLE journal_readers (
  queue TEXT NOT NULL,
  name TEXT NOT NULL,
  position INTEGER NOT NULL,
  seen_ms INTEGER NOT NULL,
  PRIMARY KEY (queue, name)
) STRICT, WITHOUT ROWID;
