"""The `inbox` contract on the seam: jobs, and the events that tell of them, in SQL tables.

Both are boxes of the ledger, with the same protocol: claim, lease, heartbeat, reclaim, and a claim
version that fences every write. What the statements do and which clause each serves stands at the
head of every file in `ledger/sql`.
"""

from __future__ import annotations

import random

from tenure.contracts.inbox.options import Options
from tenure.contracts.inbox.retrying import backoff, retry_class
from tenure.core.outcome import Outcome
from tenure.core.state import INBOX
from tenure.ledger.box import BoxQueue
from tenure.ledger.engine import Engine

FINALS = frozenset(INBOX.final)


class InboxQueue(BoxQueue):
    """The inbox: jobs to be done."""

    def __init__(self, engine: Engine, options: Options, *, worker_id: str = "") -> None:
        def delay(outcome: Outcome) -> tuple[int, bool]:
            attempt, first_ms = outcome.lease.attempt, options.retry_delay_ms
            return backoff(outcome.failure, attempt, first_ms, random.random())

        def least_ms(outcome: Outcome) -> int:
            """A task's own policy does not bypass the larger bucket of section 5."""
            return delay(outcome)[0] if retry_class(outcome.failure) == "throttled" else 0

        self.slots_max = options.at_once
        super().__init__(
            *(engine, options.settings()),
            worker_id=worker_id,
            delay=delay,
            finals=FINALS,
            least_ms=least_ms if options.box == "inbox" else lambda outcome: 0,
        )


class OutboxQueue(InboxQueue):
    """The outbox: events to be delivered, one at a time and in order for each job."""

    def __init__(self, engine: Engine, options: Options, *, worker_id: str = "") -> None:
        super().__init__(engine, options, worker_id=worker_id)
        self.claim_max = options.batch
