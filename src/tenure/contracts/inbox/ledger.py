"""The reading and steering side of an inbox or an outbox."""

from __future__ import annotations

from tenure.contracts.inbox.options import Options
from tenure.core.state import INBOX
from tenure.ledger.engine import Engine
from tenure.ledger.reading import BoxLedger


def inbox_ledger(engine: Engine, options: Options) -> BoxLedger:
    """The ledger of one box."""
    return BoxLedger(engine, options.settings(), INBOX)
