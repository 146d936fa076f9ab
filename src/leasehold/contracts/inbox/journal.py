"""The history of an inbox or an outbox: the rows of `job_journal`, in their order."""

from __future__ import annotations

from leasehold.contracts.inbox.options import Options
from leasehold.ledger.engine import Engine
from leasehold.ledger.history import BoxJournal


def inbox_journal(engine: Engine, options: Options) -> BoxJournal:
    """The journal of one box."""
    return BoxJournal(engine, options.settings())
