"""The sample queues of `tenure up`: what a contract declares, and the loop that submits.

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
    """The stores of `tenure up`: a Redis, a folder for SQLite files, and a gateway.

    `worker_key` is the file with the key that workers send to the gateway. If `postgres_url` is
    set, the SQL contracts use it instead of SQLite. With samples there are also `files`, the folder
    that `file://` may name, and `receiver_url`, to which webhooks may be sent.
    """

    redis_url: str
    folder: Path = Path()
    gateway_url: str = ""
    worker_key: Path = Path()
    receiver_url: str = ""
    files: Path = Path()
    postgres_url: str = ""

    def database(self, file: str) -> str:
        """The store of an SQL contract: PostgreSQL if it is set, else a SQLite file."""
        return self.postgres_url or f"sqlite:///{self.folder / file}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleContext:
    """The arguments of a producer.

    `folder` is for its files and is kept between starts. `environment` is for child processes.
    `locate_ffmpeg` raises `UsageError` if there is no ffmpeg. Tasks in `real` have real handlers
    and get no samples. `node` permits the use of Node.js.
    """

    stores: Stores
    folder: Path
    say: Callable[[str], None]
    environment: Mapping[str, str]
    locate_ffmpeg: Callable[[], Path]
    real: frozenset[str] = frozenset()
    node: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFlow:
    """One sample queue of a contract.

    Flows are started and listed by `rank`; the queue of the first is what the other commands speak
    to. `produce` submits jobs until cancelled; an outbox has none, because its inbox fills it.
    `handlers` are its sample handlers by task. `hint` is a line of at most 80 columns that
    tells how to reach the queue with another program. `worker_url` is the URL for the worker, if it
    goes through the gateway. `needs` are modules of an optional extra.
    """

    contract: str
    rank: int
    queue_url: Callable[[Stores], str]
    produce: Callable[[SampleContext], Coroutine[Any, Any, None]] | None = None
    handlers: Mapping[str, Callable[[Any], Awaitable[Any]]] | None = None
    hint: Callable[[Stores], str] | None = None
    worker_url: Callable[[Stores], str] | None = None
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """The modules that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]

    def served_at(self, stores: Stores) -> str:
        """The URL for the worker: `queue_url`, unless it goes through the gateway."""
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
    """Call `submit` with 0, 1, 2 ... until cancelled; pause while too many jobs are `waiting`."""
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


async def fill_queue(
    context: SampleContext, url: str, make: Callable[[int], NewJob], **pace: Any
) -> None:
    """Keep submitting the jobs that `make` returns."""
    queue = open_queue(url, worker_id=REQUESTER)
    try:
        await keep_submitting(context, url, lambda number: queue.submit([make(number)]), **pace)
    finally:
        await queue.close()


def failures(chance: random.Random) -> int:
    """How often a sample fails: 4 in 100 for good, 12 once."""
    draw = chance.random()
    return 9 if draw < 0.04 else 1 if draw < 0.16 else 0
