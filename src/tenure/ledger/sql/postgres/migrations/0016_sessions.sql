-- Sessions of browsers, kept as hashes beside the keys that opened them.

CREATE TABLE api_sessions (
  session_h text COLLATE "C" PRIMARY KEY,
  key_id text COLLATE "C" NOT NULL,
  created_ms bigint NOT NULL,
  expires_ms bigint NOT NULL,
  idle_ms bigint NOT NULL,
  seen_ms bigint NOT NULL
);
