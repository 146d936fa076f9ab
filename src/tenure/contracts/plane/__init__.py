"""The `plane` contract: a control plane over HTTP, whose workers need no inbound port.

`plane+http://host:8470?streams=jobs:high,jobs:low` is for workers. `plane+sqlite:///plane.db` and
`plane+postgresql://user@host/database` are the plane itself, for a gateway or for a producer with
access to the database.
"""

from __future__ import annotations

from tenure.contracts.plane.journal import PlaneJournal, journal_table
from tenure.contracts.plane.ledger import PlaneLedger
from tenure.contracts.plane.local import LocalQueue, open_parts, open_plane
from tenure.contracts.plane.model import PlaneOptions
from tenure.contracts.plane.queue import PlaneQueue
from tenure.core.errors import UsageError
from tenure.core.journal import SqlFormat
from tenure.core.registry import QueueUrl
from tenure.sql.engine import Engine

__all__ = ["LocalQueue", "PlaneJournal", "PlaneLedger", "PlaneQueue"]


def open_queue(url: QueueUrl, *, worker_id: str = "") -> PlaneQueue:
    """The queue behind the URL; connects on first use."""
    if url.store.startswith("http"):
        from tenure.contracts.plane.remote import open_remote  # imports ssl

        return open_remote(url, worker_id=worker_id)
    return LocalQueue(open_plane(url), worker_id=worker_id)


def open_ledger(url: QueueUrl) -> PlaneLedger:
    """The ledger of a plane, at its database."""
    _require_database(url)
    return PlaneLedger(*open_parts(url, pinned=False))


def open_journal(url: QueueUrl) -> PlaneJournal:
    """The journal of a plane, at its database."""
    _require_database(url)
    return PlaneJournal(*open_parts(url))


def open_database(url: QueueUrl) -> Engine:
    """The database of a plane, for data beside its jobs."""
    _require_database(url)
    return open_parts(url, pinned=False)[0]


def journal_format(url: QueueUrl) -> SqlFormat:
    """The table of the journal, for readers in bulk."""
    _require_database(url)
    options, store = url.read(PlaneOptions)
    return journal_table(store, options)


def _require_database(url: QueueUrl) -> None:
    if url.store.startswith("http"):
        raise UsageError(
            f"{url.safe} is a worker's side; read the plane through its gateway, or at its "
            "database with plane+sqlite:// or plane+postgresql://",
            contract="plane",
        )
