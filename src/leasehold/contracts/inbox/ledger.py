"""The reading and steering side of an inbox or an outbox."""

from __future__ import annotations

from leasehold.contracts.inbox.options import Options
from leasehold.core.state import INBOX
from leasehold.ledger.engine import Engine
from leasehold.ledger.reading import BoxLedger


def inbox_ledger(engine: Engine, options: Options) -> BoxLedger:
    """The ledger of one box."""
    return BoxLedger(engine, options.settings(), INBOX)
