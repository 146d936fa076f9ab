"""The journal: one event schema for the history of every contract.

Each event says what its writer saw (`from_state`, `prev_fence`, `prev_lease_until_ms`) and what it
left (`to_state`, `fence`, `lease_until_ms`), so that the unbroken chain of a job's history can be
checked by one aggregation that needs no order. It carries no payload and no secret.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

EVENT_TYPES = (
    "submit",  # the job is stored and waits
    "promote",  # its time came, or an operator brought it forward: it waits for a worker now
    "claim",  # a lease was taken; attempt and fence rose
    "extend",  # the holder kept its lease
    "report",  # news from the holder
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


class SqlFormat(msgspec.Struct, frozen=True, kw_only=True):
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


JournalFormat: TypeAlias = StreamFormat | SqlFormat
"""Where a journal is and how it is written, declared by a contract for readers in bulk.

`Journal` of the seam reads every history, one event object at a time. A contract whose journal has
a plain physical form may declare it by `journal_format(url)` beside `open_journal`; the pipeline
then reads ranges of it side by side, straight into columns. All others are read through the seam.
"""
