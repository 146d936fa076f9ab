"""What a sample flow is made of, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leasehold.worker.task import Task


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores that `leasehold up` has."""

    redis_url: str


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

    `feed` submits jobs until cancelled, and outlives a store's absence. `invitation` is a line that
    tells a person how to reach the queue with a program of their own, in at most 80 columns.
    """

    contract: str
    queue_url: Callable[[Stores], str]
    feed: Callable[[Place], Coroutine[Any, Any, None]]
    tasks: tuple[Task, ...] = ()
    invitation: Callable[[Stores], str] | None = None
