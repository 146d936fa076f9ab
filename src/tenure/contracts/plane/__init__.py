"""The `plane` contract: a control plane over HTTP, whose workers need no inbound port.

`plane+http://host:8470?streams=jobs:high,jobs:low` is for workers. `plane+sqlite:///plane.db` and
`plane+postgresql://user@host/database` are the plane itself, for a gateway or for a producer with
access to the database.
"""

from __future__ import annotations

from tenure.contracts.plane.ledger import PlaneJournal, PlaneLedger, journal_table
from tenure.contracts.plane.model import CONTRACT, PlaneOptions
from tenure.contracts.plane.plane import Plane
from tenure.contracts.plane.queue import PlaneQueue
from tenure.core.errors import UsageError
from tenure.core.journal import SqlFormat
from tenure.core.registry import QueueUrl
from tenure.sql import open_engine
from tenure.sql.engine import Engine
from tenure.store.redis import Redis

__all__ = ["LocalQueue", "PlaneJournal", "PlaneLedger", "PlaneQueue"]


class LocalQueue(PlaneQueue):
    """The queue over a plane of this process; a gateway starts and drains it."""

    def __init__(self, plane: Plane, *, worker_id: str = "") -> None:
        super().__init__(plane, streams=plane.streams, worker_id=worker_id)
        self.plane = plane
        self.start = plane.start
        self.drain = plane.drain
        self.take_quarantined = plane.take_quarantined


def open_queue(url: QueueUrl, *, worker_id: str = "") -> PlaneQueue:
    """The queue behind the URL; connects on first use."""
    if url.store.startswith("http"):
        from tenure.contracts.plane.remote import open_remote  # imports ssl

        return open_remote(url, worker_id=worker_id)
    return LocalQueue(_open_plane(url), worker_id=worker_id)


def open_ledger(url: QueueUrl) -> PlaneLedger:
    """The ledger of a plane, at its database."""
    _require_database(url)
    return PlaneLedger(*_open_parts(url, pinned=False))


def open_journal(url: QueueUrl) -> PlaneJournal:
    """The journal of a plane, at its database."""
    _require_database(url)
    return PlaneJournal(*_open_parts(url))


def open_database(url: QueueUrl) -> Engine:
    """The database of a plane, for data beside its jobs."""
    _require_database(url)
    return _open_parts(url, pinned=False)[0]


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


def _open_plane(url: QueueUrl) -> Plane:
    """The plane of a database; connects on first use."""
    engine, options = _open_parts(url)
    redis = Redis(options.redis, name="tenure-plane") if options.redis else None
    return Plane(engine, options, redis=redis)


def _open_parts(url: QueueUrl, *, pinned: bool = True) -> tuple[Engine, PlaneOptions]:
    """The database and the options that a URL names."""
    if not url.store:
        raise UsageError(
            f"{url.safe} names neither a plane nor a database; write plane+http://host:8470, "
            "plane+sqlite:///plane.db or plane+postgresql://user@host/database",
            contract=CONTRACT,
        )
    options, store = url.read(PlaneOptions)
    return open_engine(store, options.engine(store, pinned=pinned)), options
