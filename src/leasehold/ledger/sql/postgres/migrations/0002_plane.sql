-- What the control plane keeps beside its jobs.

CREATE TABLE plane_secrets (
  id integer PRIMARY KEY CHECK (id = 1),
  secret text NOT NULL
);
