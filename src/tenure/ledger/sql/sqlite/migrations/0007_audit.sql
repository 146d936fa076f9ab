-- Who did what through a gateway, beside the jobs it was done to.

CREATE TABLE audit_log (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  entry TEXT NOT NULL
) STRICT;
