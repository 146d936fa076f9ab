-- Who did what through a gateway, beside the jobs it was done to.

CREATE TABLE audit_log (
  seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  entry text NOT NULL
);
