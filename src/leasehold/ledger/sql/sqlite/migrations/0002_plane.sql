-- What the control plane keeps beside its jobs.

CREATE TABLE plane_secrets (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  secret TEXT NOT NULL
) STRICT;
