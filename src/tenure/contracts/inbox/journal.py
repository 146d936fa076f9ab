"""The journal of an inbox or an outbox as a table, for readers in bulk.

An outbox is read through a view, in which a step of a job is also the submit of its event. On
PostgreSQL it is read through a function, which finds the rows by the queue of the jobs.
"""

from __future__ import annotations

from tenure.contracts.inbox.options import Options
from tenure.core.journal import SqlFormat
from tenure.sql.engine import OUTBOX
from tenure.sql.sql_ledger import EVENT_FIELDS

_SUBMITS = "(type = 'submit' OR event_number > 0)"


def journal_table(store: str, options: Options) -> SqlFormat:
    """The table of one queue; it is trimmed only up to what its readers have captured."""
    settings = options.settings()
    schema = f"{options.schema}." if store.startswith("postgres") else ""
    queue = settings.queue.replace("'", "''")
    return SqlFormat(
        store=store,
        table=f"{schema}{'job_outbox_journal' if settings.table == OUTBOX else 'job_journal'}",
        contract=settings.contract,
        queue=settings.queue,
        fields=("queue", "job_id", "type", "ts_ms", *EVENT_FIELDS),
        where=f"queue = '{queue}'",
        sequence=f"{schema}job_journal_seq_seq" if schema else "job_journal",
        jobs=f"{schema}{settings.table}",
        kept="type = 'submit'" if settings.table == OUTBOX else _SUBMITS,
        queues=(settings.queue,),
        schema=options.schema,
        by_job="n.listed" if schema else "true",
        narrow=f"{schema}outbox_journal('{queue}')" if schema and settings.table == OUTBOX else "",
    )
