"""The `inbox` contract: an SQL inbox and outbox, on SQLite or PostgreSQL.

`inbox+sqlite:///jobs.db`, `inbox+postgresql://user@host/database?schema=tenure`; with
`box=outbox` it is the second queue, of events to be delivered.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tenure.contracts.inbox.credentials import InboxCredentials, WebhookSecrets
from tenure.contracts.inbox.queue import InboxQueue, Options, OutboxQueue
from tenure.core.errors import UsageError
from tenure.core.journal import SqlFormat
from tenure.core.registry import QueueUrl
from tenure.core.state import INBOX
from tenure.sql import open_engine
from tenure.sql.engine import OUTBOX, Engine, QueueSettings
from tenure.sql.sql_ledger import EVENT_FIELDS, SqlJournal, SqlLedger

__all__ = [
    "InboxQueue",
    "OutboxQueue",
    "open_box",
    "open_credentials",
    "open_endpoint_secrets",
    "open_journal",
    "open_ledger",
    "open_outbox",
    "open_queue",
]


# Contract section 2: a worker is named by its pod, host or boot, with nothing appended.
NAMED_BY_HOST = True
_SUBMITS = "(type = 'submit' OR event_number > 0)"


def open_queue(url: QueueUrl, *, worker_id: str = "") -> InboxQueue:
    """The queue behind the URL; connects on first use."""
    engine, options = open_parts(url)
    kind = OutboxQueue if options.box == "outbox" else InboxQueue
    return kind(engine, options, worker_id=worker_id)


def open_ledger(url: QueueUrl) -> SqlLedger:
    """The ledger of the same queue."""
    engine, options = open_parts(url, pinned=False)
    return SqlLedger(engine, options.settings(), INBOX)


def open_outbox(url: QueueUrl) -> SqlLedger | None:
    """The ledger of the outbox of an inbox; None for an outbox itself."""
    engine, options = open_parts(url, pinned=False)
    if options.box == "outbox":
        return None
    options = msgspec.structs.replace(options, box="outbox")
    return SqlLedger(engine, options.settings(), INBOX)


def open_journal(url: QueueUrl) -> SqlJournal:
    """The journal of the same queue."""
    engine, options = open_parts(url)
    return SqlJournal(engine, options.settings())


def open_box(url: QueueUrl) -> tuple[Engine, QueueSettings]:
    """The database and the settings of the queue, for the pipeline's bulk submits."""
    engine, options = open_parts(url)
    return engine, options.settings()


def open_database(url: QueueUrl) -> Engine:
    """The database, for data beside the jobs."""
    return open_parts(url, pinned=False)[0]


def open_credentials(url: QueueUrl) -> InboxCredentials:
    """The sealed credentials of the jobs."""
    return InboxCredentials(open_parts(url)[0])


def open_endpoint_secrets(url: QueueUrl, *, vault: Any = None) -> WebhookSecrets:
    """The secrets that sign webhooks; `vault` opens them."""
    return WebhookSecrets(open_parts(url)[0], vault)


def journal_format(url: QueueUrl) -> SqlFormat:
    """The table of the journal, for readers in bulk; it is trimmed only up to what they captured.

    An outbox is read through a view, in which a step of a job is also the submit of its event. On
    PostgreSQL it is read through a function, which finds the rows by the queue of the jobs.
    """
    options, store = url.read(Options)
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


def open_parts(url: QueueUrl, *, pinned: bool = True) -> tuple[Engine, Options]:
    """The database and the options that a URL names."""
    if not url.store:
        raise UsageError(
            f"{url.safe} names no database; write inbox+sqlite:///jobs.db or "
            "inbox+postgresql://user@host/database",
            contract="inbox",
        )
    options, store = url.read(Options)
    return open_engine(store, options.engine(store, pinned=pinned)), options
