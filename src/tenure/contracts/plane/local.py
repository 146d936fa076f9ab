"""A plane in this process: what a gateway serves, and what a producer next to the database uses."""

from __future__ import annotations

import msgspec

from tenure.contracts.plane.model import CONTRACT, PlaneOptions
from tenure.contracts.plane.plane import Plane
from tenure.contracts.plane.queue import PlaneQueue
from tenure.core.errors import UsageError
from tenure.core.registry import QueueUrl
from tenure.core.seam import QueueFeatures
from tenure.sql import open_engine
from tenure.sql.engine import Engine
from tenure.store.redis import Redis


class LocalQueue(PlaneQueue):
    """The queue over a plane of this process; a gateway starts and drains it."""

    def __init__(self, plane: Plane, *, worker_id: str = "") -> None:
        super().__init__(plane, streams=plane.streams, worker_id=worker_id)
        self.plane = plane

    @property
    def features(self) -> QueueFeatures:
        """What it has beyond the seam."""
        return msgspec.structs.replace(
            super().features,
            take_quarantined=self.plane.take_quarantined,
            start=self.plane.start,
            drain=self.plane.drain,
        )


def open_plane(url: QueueUrl) -> Plane:
    """The plane of a database; connects on first use."""
    engine, options = parts(url)
    redis = Redis(options.redis, name="tenure-plane") if options.redis else None
    return Plane(engine, options, redis=redis)


def parts(url: QueueUrl, *, pinned: bool = True) -> tuple[Engine, PlaneOptions]:
    """The database and the options that a URL names."""
    if not url.store:
        raise UsageError(
            f"{url.safe} names neither a plane nor a database; write plane+http://host:8470, "
            "plane+sqlite:///plane.db or plane+postgresql://user@host/database",
            contract=CONTRACT,
        )
    options, store = url.read(PlaneOptions)
    return open_engine(store, options.engine(store, pinned=pinned)), options
