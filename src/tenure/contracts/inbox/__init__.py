"""The `inbox` contract: an SQL inbox and outbox, on SQLite or PostgreSQL.

`inbox+sqlite:///jobs.db`, `inbox+postgresql://user@host/database?schema=tenure`; with
`box=outbox` the second queue, of events to be delivered.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tenure.contracts.inbox.credentials import InboxCredentials
from tenure.contracts.inbox.journal import inbox_journal, tape
from tenure.contracts.inbox.ledger import inbox_ledger
from tenure.contracts.inbox.options import Options
from tenure.contracts.inbox.queue import InboxQueue, OutboxQueue
from tenure.contracts.inbox.secrets import WebhookSecrets
from tenure.core.errors import UsageError
from tenure.core.journal import SqlFormat
from tenure.core.registry import QueueUrl
from tenure.ledger.engine import Engine
from tenure.ledger.history import BoxJournal
from tenure.ledger.opening import open_engine
from tenure.ledger.reading import BoxLedger
from tenure.ledger.settings import BoxSettings

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


# Contract section 2: a worker is named by its pod, host or boot, and nothing is joined to that.
NAMED_BY_HOST = True


def open_queue(url: QueueUrl, *, worker_id: str = "") -> InboxQueue:
    """The queue behind the URL; connects on first use."""
    engine, options = parts(url)
    kind = OutboxQueue if options.box == "outbox" else InboxQueue
    return kind(engine, options, worker_id=worker_id)


def open_ledger(url: QueueUrl) -> BoxLedger:
    """The ledger of the same box."""
    return inbox_ledger(*parts(url, pinned=False))


def open_outbox(url: QueueUrl) -> BoxLedger | None:
    """The ledger of the events that an inbox leaves; None of an outbox itself."""
    engine, options = parts(url, pinned=False)
    if options.box == "outbox":
        return None
    return inbox_ledger(engine, msgspec.structs.replace(options, box="outbox"))


def open_journal(url: QueueUrl) -> BoxJournal:
    """The journal of the same box."""
    return inbox_journal(*parts(url))


def open_box(url: QueueUrl) -> tuple[Engine, BoxSettings]:
    """The database and the table in it, for writers of whole columns."""
    engine, options = parts(url)
    return engine, options.settings()


def open_database(url: QueueUrl) -> Engine:
    """The database, for what is kept beside the jobs."""
    return parts(url, pinned=False)[0]


def open_credentials(url: QueueUrl) -> InboxCredentials:
    """The sealed credentials of the jobs."""
    return InboxCredentials(parts(url)[0])


def open_endpoint_secrets(url: QueueUrl, *, vault: Any = None) -> WebhookSecrets:
    """The secrets by which webhooks are signed; `vault` opens them."""
    return WebhookSecrets(parts(url)[0], vault)


def journal_format(url: QueueUrl) -> SqlFormat:
    """How the journal is written, for readers in bulk."""
    options, store = url.read(Options)
    return tape(store, options)


def parts(url: QueueUrl, *, pinned: bool = True) -> tuple[Engine, Options]:
    """The database and the options that a URL names."""
    if not url.store:
        raise UsageError(
            f"{url.safe} names no database; write inbox+sqlite:///jobs.db or "
            "inbox+postgresql://user@host/database",
            contract="inbox",
        )
    options, store = url.read(Options)
    return open_engine(store, options.engine(store, pinned=pinned)), options
