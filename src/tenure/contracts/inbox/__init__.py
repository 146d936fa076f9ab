"""The `inbox` contract: an SQL inbox and outbox, on SQLite or PostgreSQL.

`inbox+sqlite:///jobs.db`, `inbox+postgresql://user@host/database?schema=tenure`; with
`box=outbox` the second queue, of events to be delivered. Here is the descriptor; what it opens is
imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tenure.core.errors import UsageError
from tenure.core.registry import Contract, QueueUrl
from tenure.sql.engine import ROW_MACHINE

if TYPE_CHECKING:
    from tenure.contracts.inbox.credentials import InboxCredentials, WebhookSecrets
    from tenure.contracts.inbox.options import Options
    from tenure.contracts.inbox.queue import InboxQueue
    from tenure.core.endpoint import Endpoint, Submits
    from tenure.core.journal import SqlFormat
    from tenure.sql.engine import Engine, QueueSettings
    from tenure.sql.sql_ledger import SqlJournal, SqlLedger

MACHINE = msgspec.structs.replace(ROW_MACHINE, contract="inbox")


def parts(url: QueueUrl, *, pinned: bool = True) -> tuple[Engine, Options]:
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
    from tenure.contracts.inbox.options import Options

    return url.read(Options)


def _open_queue(url: QueueUrl, worker_id: str) -> InboxQueue:
    from tenure.contracts.inbox.queue import InboxQueue, OutboxQueue

    engine, options = parts(url)
    kind = OutboxQueue if options.box == "outbox" else InboxQueue
    return kind(engine, options, worker_id=worker_id)


def _open_ledger(url: QueueUrl) -> SqlLedger:
    from tenure.sql.sql_ledger import SqlLedger

    engine, options = parts(url, pinned=False)
    return SqlLedger(engine, options.settings(), MACHINE)


def _open_outbox(url: QueueUrl) -> SqlLedger | None:
    """The ledger of the outbox of an inbox; None for an outbox itself."""
    from tenure.sql.sql_ledger import SqlLedger

    engine, options = parts(url, pinned=False)
    if options.box == "outbox":
        return None
    options = msgspec.structs.replace(options, box="outbox")
    return SqlLedger(engine, options.settings(), MACHINE)


def _open_journal(url: QueueUrl) -> SqlJournal:
    from tenure.sql.sql_ledger import SqlJournal

    engine, options = parts(url)
    return SqlJournal(engine, options.settings())


def _open_box(url: QueueUrl) -> tuple[Engine, QueueSettings]:
    """The database and the settings of the queue, for writers of whole columns."""
    engine, options = parts(url)
    return engine, options.settings()


def _open_database(url: QueueUrl) -> Engine:
    """The database, for what is kept beside the jobs."""
    return parts(url, pinned=False)[0]


def _open_credentials(url: QueueUrl) -> InboxCredentials:
    """The sealed credentials of the jobs."""
    from tenure.contracts.inbox.credentials import InboxCredentials

    return InboxCredentials(parts(url)[0])


def _open_endpoint_secrets(url: QueueUrl, *, vault: Any = None) -> WebhookSecrets:
    """The secrets by which webhooks are signed; `vault` opens them."""
    from tenure.contracts.inbox.credentials import WebhookSecrets

    return WebhookSecrets(parts(url)[0], vault)


def _journal_format(url: QueueUrl) -> SqlFormat:
    from tenure.contracts.inbox.journal import journal_table

    options, store = _read_options(url)
    return journal_table(store, options)


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
    named_by_host=True,  # contract section 2: by its pod, host or boot, with nothing appended
)
