"""How a contract writes its journal, for readers in bulk."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class StreamTape(msgspec.Struct, frozen=True, kw_only=True):
    """A Redis stream of packed lines.

    Its entries hold lines (`store.journal` says how): parts in the order of `fields`, joined by
    tabs and cut off after the last that applies. The last field may itself hold tabs. `task` is
    that of jobs whose lines name none. `captured` names a hash and a field: capture leaves there
    how far it has come, and the contract trims only behind it.
    """

    store: str
    key: str
    contract: str
    queue: str
    fields: tuple[str, ...]
    task: str = ""
    captured: tuple[str, str] = ("", "")


class SqlTape(msgspec.Struct, frozen=True, kw_only=True):
    """A table of PostgreSQL or SQLite, one event a row, its columns named as the journal's fields.

    `store` is the database's URL, `seq` the column that rises with every row, `where` an SQL
    condition that narrows the table to one queue. PostgreSQL gives numbers out before their
    transactions commit; so it is read only up to a number that no open transaction can still fill:
    `sequence` names what gives the numbers, on SQLite the table where `table` is a view of it.
    `states` are the contract's words for the states that the table has, and `queue_prefix` is the
    prefix of the names of its queues. `jobs` is the table of the jobs, with `job_id` and `ver`,
    the number of the last step of each. `kept` is true of rows that trimming leaves there as long
    as what they tell of is. `queues` are the queues by the names they have in the database, whose
    `schema` is named where there may be several: capture leaves there how far it has come, and the
    contract trims only behind it. `narrow` is what to read instead of `table`, where there is
    something that holds the rows of `where` alone and finds them sooner; `by_job` is true of rows
    that are found by their job.
    """

    store: str
    table: str
    contract: str
    queue: str
    fields: tuple[str, ...]
    seq: str = "seq"
    where: str = "true"
    sequence: str = ""
    states: tuple[tuple[str, str], ...] = ()
    queue_prefix: str = ""
    jobs: str = ""
    kept: str = "type = 'submit'"
    queues: tuple[str, ...] = ()
    schema: str = ""
    narrow: str = ""
    by_job: str = "true"


Tape: TypeAlias = StreamTape | SqlTape
"""Where a journal is and how it is written, declared by a contract for readers in bulk.

`Journal` of the seam reads every history, one event object at a time. A contract whose journal has
a plain physical form may declare it by `journal_tape(url)` beside its `open_journal`; the pipeline
then reads ranges of it side by side, straight into columns. All others are read through the seam.
"""
