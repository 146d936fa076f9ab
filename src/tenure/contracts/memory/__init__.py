"""The reference contract: a whole queue in this process, for tests, trials and simulations.

`memory://name?lease_ms=15000`: whoever opens the same name in the same process shares the queue,
also from other threads and event loops. It is gone when the process ends. SPEC.md has the clauses.
"""

from __future__ import annotations

from tenure.contracts.memory.journal import MemoryJournal
from tenure.contracts.memory.ledger import MemoryLedger
from tenure.contracts.memory.queue import MemoryQueue
from tenure.contracts.memory.sharing import shared_store
from tenure.core.opening import QueueUrl
from tenure.core.seam import Journal, Ledger, Queue

__all__ = ["open_journal", "open_ledger", "open_queue"]


def open_queue(url: QueueUrl, *, worker_id: str) -> Queue:
    """The queue of this name, as one claimer sees it."""
    return MemoryQueue(shared_store(url), worker_id=worker_id)


def open_ledger(url: QueueUrl) -> Ledger:
    """The reading and steering side."""
    return MemoryLedger(shared_store(url))


def open_journal(url: QueueUrl) -> Journal:
    """The history."""
    return MemoryJournal(shared_store(url))
