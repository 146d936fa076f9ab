-- Sessions of browsers, kept as hashes beside the keys that opened them.

CREATE TABLE api_sessions (
  session_h TEXT PRIMARY KEY,
  key_id TEXT NOT NULL,
  created_ms INTEGER NOT NULL,
  expires_ms INTEGER NOT NULL,
  idle_ms INTEGER NOT NULL,
  seen_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
