"""The sample queues of `tenure up`: what a contract declares, and how a feeder keeps submitting.

Each contract has its samples in its own folder. `tenure up` serves all these queues with one
worker. Most sample jobs succeed, some need a second attempt, some fail for good.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from tenure.core.errors import StoreError
from tenure.core.job import NewJob
from tenure.core.registry import contracts, open_ledger, open_queue

REQUESTER = "tenure-samples"
KEEP_MS = 3_600_000
_WAITING_MAX = 30


class SampleFailure(Exception):
    """The failure that a sample job was asked for."""

    code = "sample_failure"


class NodeUnusable(Exception):
    """Why a Node program cannot be run here, as a message for people."""


class NodeProgram(Protocol):
    """A Node program that is ready to run."""

    @property
    def package(self) -> str:
        """The package it shows, with its version."""

    async def run(
        self, *args: str, environment: Mapping[str, str], say: Callable[[str], None]
    ) -> str:
        """Run until it ends or this is cancelled, passing on its output; returns how it ended."""


class PrepareNode(Protocol):
    """Makes a Node program ready; raises `NodeUnusable`."""

    async def __call__(
        self, sources: Path, folder: Path, package: str, *, say: Callable[[str], None]
    ) -> NodeProgram:
        """The program in `sources` with its packages in `folder`."""


class SampleJob(Protocol):
    """What the handlers of samples need of their job."""

    @property
    def payload(self) -> Any:
        """The decoded payload."""

    @property
    def attempt(self) -> int:
        """1 for the first start."""

    @property
    def report(self) -> Callable[..., Awaitable[None]]:
        """Report progress."""


@dataclass(frozen=True, slots=True)
class Stores:
    """What `tenure up` has: a Redis, a folder for files, and the gateway before them.

    `worker_key` is a file with the key that workers show to the gateway. `postgres_url` is "" where
    the SQL contracts keep their jobs in SQLite files in that folder. With samples there are
    `files`, the folder that `file://` may name, and `receiver_url`, to which webhooks may be sent.
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
class SampleContext:
    """What a feeder is given.

    `folder` is for its files and stays from one start to the next; `real` are the tasks that have
    real handlers and get no samples. `prepare_node` is None if Node.js may not be used.
    `locate_ffmpeg` raises `UsageError` where there is no ffmpeg.
    """

    stores: Stores
    folder: Path
    say: Callable[[str], None]
    locate_ffmpeg: Callable[[], Path]
    real: frozenset[str] = frozenset()
    prepare_node: PrepareNode | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFlow:
    """One sample queue of a contract.

    Flows are started and listed by `rank`; the queue of the first is what the other commands speak
    to. `feed` submits jobs until cancelled; an outbox has none, because its inbox fills it.
    `handlers` are its sample handlers by task. `invitation` is a line of at most 80 columns that
    says how to reach the queue with a program of one's own. `worker_url` is where the worker finds
    the queue, if it goes through the gateway. `needs` are modules of an optional extra.
    """

    contract: str
    rank: int
    queue_url: Callable[[Stores], str]
    feed: Callable[[SampleContext], Coroutine[Any, Any, None]] | None = None
    handlers: Mapping[str, Callable[[Any], Awaitable[Any]]] | None = None
    invitation: Callable[[Stores], str] | None = None
    worker_url: Callable[[Stores], str] | None = None
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """The modules that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]

    def served_at(self, stores: Stores) -> str:
        """Where the worker finds the queue: `queue_url`, unless it goes through the gateway."""
        return (self.worker_url or self.queue_url)(stores)


def sample_flows() -> list[SampleFlow]:
    """The flows of all contracts, by rank."""
    declared = [contract.samples() for contract in contracts().values() if contract.samples]
    return sorted((flow for flows in declared for flow in flows), key=lambda flow: flow.rank)


def usable_flows(say: Callable[[str], None]) -> list[SampleFlow]:
    """All whose modules are installed; `say` names what the others lack."""
    flows = sample_flows()
    lacking = {flow.contract: flow.missing() for flow in flows if flow.missing()}
    for contract, names in lacking.items():
        say(
            f"without {contract}: not installed are {', '.join(names)} "
            "(pip install 'tenure[transcode]')"
        )
    return [flow for flow in flows if flow.contract not in lacking]


async def keep_submitting(
    context: SampleContext,
    url: str,
    submit: Callable[[int], Awaitable[object]],
    *,
    waiting: Sequence[str],
    per_s: float,
    pause_s_max: float = 2.0,
) -> None:
    """Call `submit` with 0, 1, 2 ... until cancelled, unless too many jobs are `waiting`."""
    ledger, away, number = open_ledger(url), False, 0
    try:
        while True:
            try:
                states = (await ledger.counts()).states
                if sum(states.get(state, 0) for state in waiting) < _WAITING_MAX:
                    await submit(number)
                    number += 1
                away = False
            except StoreError as error:
                if not away:
                    context.say(f"samples pause: {error}")
                away = True
            await asyncio.sleep(1.0 if away else min(random.expovariate(per_s), pause_s_max))
    finally:
        await ledger.close()


async def feed_queue(
    context: SampleContext, url: str, make: Callable[[int], NewJob], **pace: Any
) -> None:
    """Keep submitting the jobs that `make` returns."""
    queue = open_queue(url, worker_id=REQUESTER)
    try:
        await keep_submitting(context, url, lambda number: queue.submit([make(number)]), **pace)
    finally:
        await queue.close()


def failures(chance: random.Random) -> int:
    """How often a sample shall fail: 4 in 100 for good, 12 once."""
    draw = chance.random()
    return 9 if draw < 0.04 else 1 if draw < 0.16 else 0
