"""The SQL truth that the inbox and the control plane share: boxes of jobs, attempts and a journal.

`engine` opens a database, SQLite or PostgreSQL, with the same operations; `box` is a queue over one
of its tables; `reading` and `history` are the ledger and the journal of the same table.
"""
