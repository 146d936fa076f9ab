"""What a sample flow is made of, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tenure.cli.config import Config
from tenure.worker.task import Task


@dataclass(frozen=True, slots=True)
class Stores:
    """What `tenure up` has: a Redis, a folder for files, and the gateway before them.

    `worker_key` is a file with the key that workers show to the gateway. `postgres_url` is "" where
    the SQL contracts keep their jobs in SQLite files in that folder.

    With samples there are `files`, the folder that `file://` may name, and `receiver_url`, to which
    webhooks may be sent.
    """

    redis_url: str
    folder: Path = Path()
    gateway_url: str = ""
    worker_key: Path = Path()
    receiver_url: str = ""
    files: Path = Path()
    postgres_url: str = ""

    def database(self, file: str) -> str:
        """The store of an SQL contract: PostgreSQL if there is one, else a file of this name."""
        return self.postgres_url or f"sqlite:///{self.folder / file}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a flow runs.

    `folder` is for its files and stays from one start to the next; `real` are the tasks that have
    real handlers, to which no sample is sent; `node` says whether Node.js may be used.
    """

    stores: Stores
    folder: Path
    say: Callable[[str], None]
    real: frozenset[str] = frozenset()
    node: bool = True


@dataclass(frozen=True, slots=True)
class SampleFlow:
    """A contract's samples.

    `feed` submits jobs until cancelled, and outlives a store's absence; without it somebody else
    fills the queue. `invitation` is a line that tells a person how to reach the queue with their
    own program, in at most 80 columns; it may be empty. `handlers` makes tasks from the settings
    and the URLs that the worker serves, where `tasks` will not do. `needs` are modules of an
    optional extra.
    """

    contract: str
    queue_url: Callable[[Stores], str]
    feed: Callable[[Place], Coroutine[Any, Any, None]] | None = None
    tasks: tuple[Task, ...] = ()
    invitation: Callable[[Stores], str] | None = None
    worker_url: Callable[[Stores], str] | None = None
    handlers: Callable[[Config, Sequence[str]], list[Task]] | None = None
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """The modules that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]

    def served_at(self, stores: Stores) -> str:
        """Where the worker finds the queue: `queue_url`, unless it goes through the gateway."""
        return (self.worker_url or self.queue_url)(stores)
