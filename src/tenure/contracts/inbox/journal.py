"""The history of an inbox or an outbox: the rows of `job_journal`, in their order.

An outbox reads them through a view, in which the step of a job is the submit of its event too; on
PostgreSQL through a function, which finds them by the queue of the jobs.
"""

from __future__ import annotations

from tenure.contracts.inbox.options import Options
from tenure.core.journal import SqlFormat
from tenure.ledger.engine import OUTBOX, Engine
from tenure.ledger.history import EVENT_FIELDS, BoxJournal


def inbox_journal(engine: Engine, options: Options) -> BoxJournal:
    """The journal of one box."""
    return BoxJournal(engine, options.settings())


def tape(store: str, options: Options) -> SqlFormat:
    """The same table for readers in bulk; it is trimmed only behind what they captured."""
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
        kept="type = 'submit'" if settings.table == OUTBOX else "(type = 'submit' OR told > 0)",
        queues=(settings.queue,),
        schema=options.schema,
        by_job="n.listed" if schema else "true",
        narrow=f"{schema}outbox_journal('{queue}')" if schema and settings.table == OUTBOX else "",
    )
