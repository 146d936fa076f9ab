"""A plane of this process, for a gateway or for a producer with access to the database."""

from __future__ import annotations

from tenure.contracts.plane.model import CONTRACT, PlaneOptions
from tenure.contracts.plane.plane import Plane
from tenure.contracts.plane.queue import PlaneQueue
from tenure.core.errors import UsageError
from tenure.core.registry import QueueUrl
from tenure.sql import open_engine
from tenure.sql.engine import Engine
from tenure.store.redis import Redis


class LocalQueue(PlaneQueue):
    """The queue over a plane of this process; a gateway starts and drains it."""

    def __init__(self, plane: Plane, *, worker_id: str = "") -> None:
        super().__init__(plane, streams=plane.streams, worker_id=worker_id)
        self.plane = plane
        self.start = plane.start
        self.drain = plane.drain
        self.take_quarantined = plane.take_quarantined


def open_plane(url: QueueUrl) -> Plane:
    """The plane of a database; connects on first use."""
    engine, options = open_parts(url)
    redis = Redis(options.redis, name="tenure-plane") if options.redis else None
    return Plane(engine, options, redis=redis)


def open_parts(url: QueueUrl, *, pinned: bool = True) -> tuple[Engine, PlaneOptions]:
    """The database and the options that a URL names."""
    if not url.store:
        raise UsageError(
            f"{url.safe} names neither a plane nor a database; write plane+http://host:8470, "
            "plane+sqlite:///plane.db or plane+postgresql://user@host/database",
            contract=CONTRACT,
        )
    options, store = url.read(PlaneOptions)
    return open_engine(store, options.engine(store, pinned=pinned)), options
