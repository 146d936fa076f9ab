"""The journal: one event schema for the history of every contract.

Each event says what its writer found (`from_state`, `prev_fence`, `prev_lease_until_ms`) and what
it left (`to_state`, `fence`, `lease_until_ms`). So one aggregation, which needs no order, can check
that a job's history is an unbroken chain. Events carry no payload and no secret.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

EVENT_TYPES = (
    "submit",  # the job is stored and waits
    "promote",  # it became due, or an operator brought it forward: it waits for a worker now
    "claim",  # a lease was taken; attempt and fence rose
    "extend",  # the holder kept its lease
    "report",  # the holder reported progress
    "complete",  # accepted results
    "fail",  # failed, and what becomes of it is decided next
    "retry",  # failed, waits again
    "bury",  # failed for good
    "snooze",  # put back by its handler, attempt not counted
    "release",  # put back by its worker, attempt not counted
    "reap",  # the lease ran out and was taken away
    "cancel",  # ended on request
    "expire",  # it outlived its time to live before it ran
    "reopen",  # an operator sent a finished job back: a new epoch
    "remove",  # an operator deleted it
    "reject",  # the write of a stale holder was refused; nothing changed
    "pause",  # of the queue, not of a job: no more claims
    "resume",  # of the queue: claims again
)


class JournalEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One transition, in store order by `seq`; `ver` counts 1, 2, 3 ... within the job.

    `ver` 0 marks an event that changed no job (`reject`, `pause`, `resume`). Zero and "" mean
    "not applicable".
    """

    seq: str
    contract: str
    queue: str
    job_id: str
    type: str
    ts_ms: int
    ver: int = 0
    task: str = ""
    from_state: str = ""
    to_state: str = ""
    attempt: int = 0
    fence: int = 0
    prev_fence: int = 0
    token_h: str = ""
    worker_id: str = ""
    lease_until_ms: int = 0
    prev_lease_until_ms: int = 0
    event_id: str = ""
    gid: str = ""
    priority: int = 0
    due_ms: int = 0
    max_attempts: int = 0
    error_code: str = ""
    payload_h: str = ""
    result_h: str = ""
    data: str = ""


class StreamFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A Redis stream of packed lines.

    Its entries hold lines (see `store.journal`): values in the order of `fields`, joined by tabs,
    without the empty ones at the end. The last field may contain tabs. `task` is the task of jobs
    whose lines name none. `captured` is a hash and a field in which capture stores its position;
    the contract trims only what was captured.
    """

    store: str
    key: str
    contract: str
    queue: str
    fields: tuple[str, ...]
    task: str = ""
    captured: tuple[str, str] = ("", "")


class SqlFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A table of PostgreSQL or SQLite, one event a row, its columns named as the journal's fields.

    store         the URL of the database
    seq           the column that rises with every row
    where         an SQL condition that selects the rows of one queue
    sequence      what numbers the rows, on SQLite the table if `table` is a view of it. PostgreSQL
                  assigns numbers before their transactions commit, so rows are read only up to a
                  number that no open transaction can still use
    states        pairs: a state of the table, and the contract's word for it
    queue_prefix  the prefix of the queues' names in the table
    jobs          the table of the jobs, with `job_id` and `ver`, the number of their last event
    kept          an SQL condition for rows that are trimmed only with their job
    queues        the queues by their names in the database, where capture stores its position; the
                  contract trims only what was captured
    schema        the schema of the database, if there may be several
    narrow        what to read instead of `table`, if something faster holds the rows of `where`
    by_job        an SQL condition for rows that can be found by their job
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


JournalFormat: TypeAlias = StreamFormat | SqlFormat
"""Where a journal is and how it is written, for readers in bulk.

`Journal` of the seam reads any history, one event object at a time. If the descriptor of a contract
has a `journal_format`, the pipeline reads ranges of the journal in parallel, straight into columns.
"""
