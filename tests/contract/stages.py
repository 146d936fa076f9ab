"""A queue in a real store for one test: opened by its URL, on real time, its answers can be lost.

Each adapter says what is its own: the URL, the words, and `lossy`, which opens a queue whose next
answer can be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

from tenure.core.registry import open_journal, open_ledger, open_queue
from tenure.core.seam import Journal, Ledger, Queue, WorkerBeat
from tenure.store.redis import Redis, Script
from tests.chaos.proxy import LossyProxy
from tests.redis_topologies import one_server

Close: TypeAlias = Callable[[], Awaitable[Any]]
Lossy: TypeAlias = Callable[[str], Awaitable[tuple[Queue, Callable[[], None], Close]]]
"""For a worker's id: a queue, what makes it lose its next answer, and what ends the wire."""


@dataclass(frozen=True)
class Words:
    """The contract's own state names."""

    waiting: str
    running: str
    done: str
    failed: str
    cancelled: str

    def of(self, *names: str) -> tuple[str, ...]:
        """The contract's words for ours."""
        return tuple(getattr(self, name) for name in names)


@runtime_checkable
class Staffed(Protocol):
    """A ledger that knows the workers, those included that have nothing to do."""

    async def workers(self) -> list[WorkerBeat]: ...


@runtime_checkable
class Staffing(Protocol):
    """A queue that tells its store how many jobs its worker runs at once."""

    slots: int


@dataclass
class StoredStage:
    """One isolated queue. `served_url` is where the jobs lie, if `url` is a worker's far away.

    `line_of` tells the part of the queue that a job is in, where each part has its own order.
    """

    url: str
    lease_ms: int
    cannot: Mapping[str, str]
    words: Words
    lossy: Lossy
    clean: Close | None = None
    served_url: str = ""
    line_of: Callable[[str], str] | None = None
    ledger: Ledger = field(init=False)
    journal: Journal = field(init=False)
    _closing: list[Close] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.served_url = self.served_url or self.url
        self.ledger = open_ledger(self.served_url)
        self.journal = open_journal(self.served_url)
        self._closing += [self.ledger.close, self.journal.close]

    def queue(self, worker_id: str = "") -> Queue:
        queue = open_queue(self.url, worker_id=worker_id)
        self._closing.append(queue.close)
        return queue

    async def lossy_queue(self, worker_id: str) -> tuple[Queue, Callable[[], None]]:
        queue, lose, end = await self.lossy(worker_id)
        self._closing += [queue.close, end]
        return queue, lose

    async def advance(self, ms: int) -> None:
        # A little more than asked for: the store counts whole milliseconds of its own.
        await asyncio.sleep((ms + 5) / 1000)

    async def close(self) -> None:
        for close in self._closing:
            await close()
        if self.clean is not None:
            await self.clean()


def query_of(options: Mapping[str, object]) -> str:
    """Options as a queue URL writes them."""
    return "&".join(f"{name}={value}" for name, value in options.items())


def redis_stage(
    adapter: Any,
    server_url: str,
    query: str,
    *,
    lease_ms: int,
    words: Words,
    scripts: Mapping[str, Script],
    tag: str,
) -> StoredStage:
    """A queue of this adapter's contract on a Redis; what can be lost is the answer of a script.

    `tag` is the hash tag of its keys.
    """

    async def lossy(worker_id: str) -> tuple[Queue, Callable[[], None], Close]:
        # A proxy stands before one server, so it stands before the one that has the queue.
        single = await asyncio.to_thread(one_server, server_url, tag)
        await load_scripts(single, scripts)
        proxy = await LossyProxy(single).start()
        queue = open_queue(f"{contract}+{proxy.url}?{query}", worker_id=worker_id)
        return queue, partial(proxy.drop_reply, when=runs_a_script), proxy.stop

    contract = adapter.name.partition("_")[0]
    url = f"{contract}+{server_url}?{query}"
    return StoredStage(url, lease_ms, adapter.cannot, words, lossy)


async def load_scripts(server_url: str, scripts: Mapping[str, Script]) -> None:
    """So that what is lost is the answer of a script, not that the server lacks it."""
    client = Redis(server_url)
    await client.pipeline([("SCRIPT", "LOAD", script.source) for script in scripts.values()])
    await client.close()


def runs_a_script(command: Any) -> bool:
    """Whether a Redis command is the run of a script."""
    return bytes(command[0]).upper() in (b"EVALSHA", b"EVAL")
