"""The `inbox` contract: an SQL inbox and outbox, on SQLite or PostgreSQL.

`inbox+sqlite:///jobs.db`, `inbox+postgresql://user@host/database?schema=tenure`; with
`box=outbox` it is the second queue, of events to be delivered. Here is the descriptor; what it
opens is imported on first use. Comments that name a section of the inbox contract mean its original
text; the table at the end of SPEC.md says what each section became.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tenure.core.errors import UsageError
from tenure.core.journal import SqlFormat
from tenure.core.registry import Contract, QueueUrl
from tenure.sql.engine import OUTBOX, ROW_MACHINE

if TYPE_CHECKING:
    from tenure.contracts.inbox.credentials import InboxCredentials, WebhookSecrets
    from tenure.contracts.inbox.queue import InboxQueue, Options
    from tenure.core.endpoint import Endpoint, Submits
    from tenure.sql.engine import Engine, QueueSettings
    from tenure.sql.sql_ledger import SqlJournal, SqlLedger

_SUBMITS = "(type = 'submit' OR event_number > 0)"

MACHINE = msgspec.structs.replace(ROW_MACHINE, contract="inbox")


def open_parts(url: QueueUrl, *, pinned: bool = True) -> tuple[Engine, Options]:
    """The database and the options that a URL names."""
    from tenure.sql import open_engine

    if not url.store:
        raise UsageError(
            f"{url.safe} names no database; write inbox+sqlite:///jobs.db or "
            "inbox+postgresql://user@host/database",
            contract="inbox",
        )
    options, store = _read_options(url)
    return open_engine(store, options.engine(store, pinned=pinned)), options


def _read_options(url: QueueUrl) -> tuple[Options, str]:
    from tenure.contracts.inbox.queue import Options
    from tenure.store.credentials import LOGIN_OPTIONS

    return url.read(Options, of_store=LOGIN_OPTIONS)


def _open_queue(url: QueueUrl, worker_id: str) -> InboxQueue:
    from tenure.contracts.inbox.queue import InboxQueue, OutboxQueue

    engine, options = open_parts(url)
    kind = OutboxQueue if options.box == "outbox" else InboxQueue
    return kind(engine, options, worker_id=worker_id)


def _open_ledger(url: QueueUrl) -> SqlLedger:
    from tenure.sql.sql_ledger import SqlLedger

    engine, options = open_parts(url, pinned=False)
    return SqlLedger(engine, options.settings(), MACHINE)


def _open_outbox(url: QueueUrl) -> SqlLedger | None:
    """The ledger of the outbox of an inbox; None for an outbox itself."""
    from tenure.sql.sql_ledger import SqlLedger

    engine, options = open_parts(url, pinned=False)
    if options.box == "outbox":
        return None
    options = msgspec.structs.replace(options, box="outbox")
    return SqlLedger(engine, options.settings(), MACHINE)


def _open_journal(url: QueueUrl) -> SqlJournal:
    from tenure.sql.sql_ledger import SqlJournal

    engine, options = open_parts(url)
    return SqlJournal(engine, options.settings())


def _open_box(url: QueueUrl) -> tuple[Engine, QueueSettings]:
    """The database and the settings of the queue, for the pipeline's bulk submits."""
    engine, options = open_parts(url)
    return engine, options.settings()


def _open_database(url: QueueUrl) -> Engine:
    """The database, for data beside the jobs."""
    return open_parts(url, pinned=False)[0]


def _open_credentials(url: QueueUrl) -> InboxCredentials:
    """The sealed credentials of the jobs."""
    from tenure.contracts.inbox.credentials import InboxCredentials

    return InboxCredentials(open_parts(url)[0])


def _open_endpoint_secrets(url: QueueUrl, *, vault: Any = None) -> WebhookSecrets:
    """The secrets that sign webhooks; `vault` opens them."""
    from tenure.contracts.inbox.credentials import WebhookSecrets

    return WebhookSecrets(open_parts(url)[0], vault)


def _journal_format(url: QueueUrl) -> SqlFormat:
    """The table of the journal; it is trimmed only up to what readers captured.

    An outbox is read through a view, in which a step of a job is also the submit of its event. On
    PostgreSQL it is read through a function, which finds the rows by the queue of the jobs.
    """
    from tenure.sql.sql_ledger import EVENT_FIELDS

    options, store = _read_options(url)
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


def _routes(submits: Submits, ledger: Any, queue: Any, **given: Any) -> list[Endpoint]:
    from tenure.contracts.inbox.routes import open_routes

    return open_routes(submits, ledger, **given)


def _samples() -> Sequence[Any]:
    from tenure.contracts.inbox.samples import FLOWS

    return FLOWS


CONTRACT = Contract(
    machine=MACHINE,
    open_queue=_open_queue,
    open_ledger=_open_ledger,
    open_journal=_open_journal,
    read_options=_read_options,
    example_url="inbox+sqlite:///jobs.db",
    journal_format=_journal_format,
    parts={
        "box": _open_box,
        "credentials": _open_credentials,
        "database": _open_database,
        "endpoint_secrets": _open_endpoint_secrets,
        "outbox": _open_outbox,
    },
    routes=_routes,
    samples=_samples,
    lost_max_option="lost_max",
    named_by_host=True,  # by its pod, host or boot, with nothing appended (section 2)
    submit_options=frozenset({"priority", "ttl_s"}),
)
